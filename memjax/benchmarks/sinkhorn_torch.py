"""Momentum and Sinkhorn balancing of a whole table in plain PyTorch.

What: `contender`, the other side of `sinkhorn`, in two ways; the faster counts.
Why: as the algorithm is printed, and with carried factors as a careful user would.
When not: without the extra `bench`.

Source: arXiv:2609.19969 section 2.5, Algorithm 1; the code is ours.
"""

from collections.abc import Callable
from typing import Any

from memjax.benchmarks.contender import Contender, Ready, torch_device, torch_peer
from memjax.benchmarks.sinkhorn import (
    BETA,
    EPS,
    GAMMA,
    N_ITERATIONS,
    RATE,
    TAU,
    SinkhornCase,
    arrays,
)


def contender(**arguments: Any) -> Contender:
    """PyTorch's side."""
    case = SinkhornCase(**arguments)
    return Contender("torch", lambda: _ready(case))


def _ready(case: SinkhornCase) -> Ready:
    torch = torch_peer()
    given = {n: torch.from_numpy(x).to(torch_device()) for n, x in arrays(case).items()}
    ids = given["ids"].long()
    table = torch.zeros(case.n_rows, case.width, device=torch_device())
    momentum, gradient = torch.zeros_like(table), torch.zeros_like(table)
    turn = [0]

    def step(move: Callable[[Any, Any, Any], None]) -> Callable[[], None]:
        def run() -> None:
            i = turn[0] % case.n_sets
            turn[0] += 1
            gradient.zero_()
            gradient[ids[i]] = given["sums"][i]
            momentum.lerp_(gradient, 1 - BETA)
            ahead = torch.lerp(momentum, gradient, 1 - BETA)
            norms = torch.linalg.vector_norm(ahead, dim=1)
            move(table, ahead, norms > TAU * norms.mean())
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        return torch.no_grad()(run)

    calls = {
        "factors": step(lambda *args: _by_factors(torch, *args)),
        "as_printed": step(lambda *args: _as_printed(torch, *args)),
    }

    def outputs() -> dict[str, Any]:
        for _ in range(3):
            calls["factors"]()
        return {"table": (table @ given["probe"]).cpu().numpy()}

    return Ready(variants=calls, outputs=outputs)


def _by_factors(torch: Any, table: Any, ahead: Any, kept: Any) -> None:
    """The squares are formed once; only two vectors change."""
    squares = ahead * ahead
    rows = kept.to(ahead.dtype)
    columns = torch.ones_like(ahead[0])
    for k in range(N_ITERATIONS):
        if k % 2 == 0:
            norms = rows * (squares @ (columns * columns)).sqrt()
            rows = rows / (norms + EPS)
        else:
            norms = columns * ((rows * rows) @ squares).sqrt()
            columns = columns / (norms + EPS)
    ahead.mul_(rows[:, None]).mul_(columns)
    table.add_(ahead, alpha=-RATE * GAMMA * ahead.shape[1] ** 0.5)


def _as_printed(torch: Any, table: Any, ahead: Any, kept: Any) -> None:
    """The matrix is divided by its norms in turn."""
    ahead.mul_(kept[:, None])
    for k in range(N_ITERATIONS):
        dim = 1 - k % 2
        norms = torch.linalg.vector_norm(ahead, dim=dim, keepdim=True)
        ahead.div_(norms + EPS)
    table.add_(ahead, alpha=-RATE * GAMMA * ahead.shape[1] ** 0.5)
