"""Product-key memories in plain PyTorch.

What: `contender`, the other side of `product_keys` and `memory_plus`.
Why: as a PyTorch user would write them, with what we found to be faster beside what is
    usual; the fastest counts.
When not: without the extra `bench`.

Two ways to select the best k of k * k pairs of halves: "grid", all of them (as in
facebookresearch/XLM), and "pairs", those that can win when both halves are sorted.
Adam in its foreach form, the default, and its fused one. "grid_foreach" is the usual
step.
"""

from collections.abc import Callable
from typing import Any

from memjax.benchmarks.contender import Contender, Ready, torch_device, torch_peer
from memjax.benchmarks.product_keys import (
    ADAM_EPS,
    LEARNING_RATE,
    ProductKeyCase,
    arrays,
)


def contender(**arguments: Any) -> Contender:
    """PyTorch's side."""
    case = ProductKeyCase(**arguments)
    return Contender("torch", lambda: _ready(case))


class _Memory:
    """Weights as leaves, and the read in a chosen way."""

    def __init__(self, case: ProductKeyCase) -> None:
        self.torch, self.case = torch_peer(), case
        given = arrays(case)

        def tensor(values: Any) -> Any:
            return self.torch.from_numpy(values).to(torch_device())

        self.weights = {name: tensor(v) for name, v in given["weights"].items()}
        self.x, self.aim, self.probe = (tensor(given[n]) for n in ("x", "aim", "probe"))
        for weight in self.weights.values():
            weight.requires_grad_(True)
        # Pairs (i, j), counted from 0, of two sorted lists of k that can be in the best
        # k sums: (i + 1) (j + 1) <= k.
        k = case.k
        pairs = [(i, j) for i in range(k) for j in range(k // (i + 1))]
        self._first, self._second = (
            self.torch.tensor(side, device=torch_device())
            for side in zip(*pairs, strict=True)
        )

    def scores(self) -> Any:
        """Scores [2H, T, N] of the half-keys, by head and half."""
        case, w = self.case, self.weights
        q = self.torch.addmm(w["bias"], self.x, w["kernel"])
        q = q.view(case.n_tokens, 2 * case.n_heads, case.half_width).transpose(0, 1)
        keys = w["keys"].view(2 * case.n_heads, case.n_sub_keys, case.half_width)
        return self.torch.bmm(q, keys.transpose(1, 2))

    def grid(self) -> tuple[Any, Any]:
        """Scores and slots [H, T, K] of the best of all K * K pairs."""
        s1, i1, s2, i2 = self._halves()
        k = self.case.k
        sums = (s1[..., :, None] + s2[..., None, :]).flatten(-2)
        scores, place = sums.topk(k, -1)
        slots = i1.gather(-1, place // k) * self.case.n_sub_keys
        return scores, slots + i2.gather(-1, place % k)

    def pairs(self) -> tuple[Any, Any]:
        """The same, of the pairs that can be among the best."""
        s1, i1, s2, i2 = self._halves()
        sums = s1[..., self._first] + s2[..., self._second]
        scores, place = sums.topk(self.case.k, -1)
        slots = i1.gather(-1, self._first[place]) * self.case.n_sub_keys
        return scores, slots + i2.gather(-1, self._second[place])

    def _halves(self) -> tuple[Any, Any, Any, Any]:
        case = self.case
        scores, index = self.scores().topk(case.k, -1)
        shape = (case.n_heads, 2, case.n_tokens, case.k)
        scores, index = scores.view(shape), index.view(shape)
        return scores[:, 0], index[:, 0], scores[:, 1], index[:, 1]

    def read(self, select: Callable[[], tuple[Any, Any]]) -> Any:
        """y [T, D]."""
        functional = self.torch.nn.functional
        w, n_tokens = self.weights, self.case.n_tokens
        scores, slots = select()
        weights = functional.softmax(scores, -1)
        y = functional.embedding_bag(
            slots.transpose(0, 1).reshape(n_tokens, -1),
            w["table"],
            mode="sum",
            per_sample_weights=weights.transpose(0, 1).reshape(n_tokens, -1),
            sparse=self.case.form == "rows",
        )
        if self.case.layer == "xlm":
            return y
        gate = self.torch.addmm(w["gate_bias"], self.x, w["gate_kernel"])
        y = y * functional.silu(gate)
        return self.torch.addmm(w["value_bias"], y, w["value_kernel"])

    def loss(self, select: Callable[[], tuple[Any, Any]]) -> Any:
        """Half the squared distance to the aim, mean over tokens."""
        return 0.5 * ((self.read(select) - self.aim) ** 2).sum() / len(self.x)

    def done(self) -> None:
        """Wait for the device."""
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def probed(self, table: Any) -> Any:
        """One number for each row of a table, or of a sparse gradient."""
        if not table.is_sparse:
            return table @ self.probe
        table = table.coalesce()
        found = self.torch.zeros(self.case.n_rows, device=self.probe.device)
        found[table.indices()[0]] = table.values() @ self.probe
        return found


def _ready(case: ProductKeyCase) -> Ready:
    memory = _Memory(case)
    if case.part == "read":
        return _read(memory)
    if case.part == "read_backward":
        return _read_backward(memory)
    return _step(memory)


def _read(memory: _Memory) -> Ready:
    def using(select: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with memory.torch.no_grad():
                y = memory.read(select)
            memory.done()
            return y

        return run

    variants = {"grid": using(memory.grid), "pairs": using(memory.pairs)}
    return Ready(variants=variants, outputs=lambda: {"y": _numpy(variants["grid"]())})


def _read_backward(memory: _Memory) -> Ready:
    memory.x.requires_grad_(True)
    wanted = {"x": memory.x, **memory.weights}

    def using(select: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            grads = memory.torch.autograd.grad(
                memory.loss(select), list(wanted.values())
            )
            memory.done()
            return grads

        return run

    variants = {"grid": using(memory.grid), "pairs": using(memory.pairs)}

    def outputs() -> dict[str, Any]:
        found = dict(zip(wanted, variants["grid"](), strict=True))
        found["table"] = memory.probed(found["table"])
        return {name: _numpy(value) for name, value in found.items()}

    return Ready(variants=variants, outputs=outputs)


def _step(memory: _Memory) -> Ready:
    optim = memory.torch.optim
    weights = dict(memory.weights)
    table = [weights.pop("table")] if memory.case.form == "rows" else []
    settings = dict(lr=LEARNING_RATE, eps=ADAM_EPS)
    forms = {
        name: optim.Adam(weights.values(), **settings, **{name: True})
        for name in ("fused", "foreach")
    }
    forms["foreach"].state = forms["fused"].state  # one set of moments
    sparse = optim.SparseAdam(table, **settings) if table else None

    def using(adam: Any, select: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = memory.loss(select)
            loss.backward()
            adam.step()
            adam.zero_grad(set_to_none=True)
            if sparse is not None:
                sparse.step()
                sparse.zero_grad(set_to_none=True)
            memory.done()
            return loss

        return run

    variants = {
        "pairs_fused": using(forms["fused"], memory.pairs),
        "pairs_foreach": using(forms["foreach"], memory.pairs),
        "grid_foreach": using(forms["foreach"], memory.grid),
    }
    if sparse is not None:  # the dense Adam has only keys and query weights here
        del variants["pairs_foreach"]
    kept = {name: memory.weights[name].detach().clone() for name in ("kernel", "keys")}
    with memory.torch.no_grad():
        before = memory.probed(memory.weights["table"])

    def outputs() -> dict[str, Any]:
        loss = variants["pairs_fused"]()
        with memory.torch.no_grad():
            found = {name: memory.weights[name] - old for name, old in kept.items()}
            found["table"] = memory.probed(memory.weights["table"]) - before
        return {name: _numpy(x) for name, x in (found | {"loss": loss}).items()}

    return Ready(variants=variants, outputs=outputs)


def _numpy(tensor: Any) -> Any:
    return tensor.detach().cpu().numpy()
