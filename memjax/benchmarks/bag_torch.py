"""The weighted row sum and its gradients in plain PyTorch.

What: `contender`, the other side of `bag`.
Why: what a PyTorch user would write, in each way we could think of; the fastest counts.
When not: without the extra `bench`.
"""

from collections.abc import Callable
from typing import Any

from memjax.benchmarks.bag import BagCase, arrays
from memjax.benchmarks.contender import Contender, Ready, torch_device, torch_peer


def contender(**arguments: Any) -> Contender:
    """PyTorch's side."""
    case = BagCase(**arguments)
    return Contender("torch", lambda: _ready(case))


def _ready(case: BagCase) -> Ready:
    torch = torch_peer()
    given = {n: torch.from_numpy(x).to(torch_device()) for n, x in arrays(case).items()}
    given["ids"] = given["ids"].long()
    make = {
        "forward": _forward,
        "weight_gradient": _weight_gradient,
        "row_sums": _row_sums,
        "table_gradient": _table_gradient,
    }[case.part]
    calls = make(torch, given)

    def run(call: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            out = call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return out

        return timed

    def outputs() -> dict[str, Any]:
        out = next(iter(calls.values()))()
        probe_W = given["probe"]
        if case.part == "row_sums":
            found = torch.zeros(case.n_rows, device=probe_W.device)
            rows_U, sums_UW = out
            found[rows_U] = sums_UW @ probe_W
            out = found
        elif case.part == "table_gradient":
            out = out @ probe_W
        return {"out": out.detach().cpu().numpy()}

    return Ready(
        variants={name: run(call) for name, call in calls.items()}, outputs=outputs
    )


def _forward(torch: Any, given: Any) -> dict[str, Any]:
    bag = torch.nn.functional.embedding_bag

    def embedding_bag() -> Any:
        weights = given["weights"]
        return bag(given["ids"], given["table"], mode="sum", per_sample_weights=weights)

    def gather_einsum() -> Any:
        return torch.einsum(
            "nkw,nk->nw", given["table"][given["ids"]], given["weights"]
        )

    return {
        "embedding_bag": torch.no_grad()(embedding_bag),
        "gather_einsum": torch.no_grad()(gather_einsum),
    }


def _pulled_back(torch: Any, given: Any, wanted: str, sparse: bool) -> Any:
    """A function that does the backward pass alone."""
    table, weights = given["table"], given["weights"]
    of = given[wanted].requires_grad_(True)
    out = torch.nn.functional.embedding_bag(
        given["ids"], table, mode="sum", per_sample_weights=weights, sparse=sparse
    )

    def backward() -> Any:
        return torch.autograd.grad(out, of, given["cotangent"], retain_graph=True)[0]

    return backward


def _weight_gradient(torch: Any, given: Any) -> dict[str, Any]:
    def by_chunks() -> Any:
        table, cotangent = given["table"], given["cotangent"]
        return torch.cat(
            [
                torch.bmm(table[ids], g[:, :, None])[:, :, 0]
                for ids, g in zip(
                    given["ids"].split(64), cotangent.split(64), strict=True
                )
            ]
        )

    return {
        "embedding_bag": _pulled_back(torch, given, "weights", sparse=False),
        "chunks_bmm": torch.no_grad()(by_chunks),
    }


def _row_sums(torch: Any, given: Any) -> dict[str, Any]:
    backward = _pulled_back(torch, given, "table", sparse=True)

    def by_unique() -> Any:
        ids, table = given["ids"], given["table"]
        rows, place = torch.unique(ids, return_inverse=True)
        parts = given["weights"][..., None] * given["cotangent"][:, None]
        sums = torch.zeros(len(rows), table.shape[1], device=table.device)
        sums.index_add_(0, place.reshape(-1), parts.reshape(-1, table.shape[1]))
        return rows, sums

    def by_coalesce() -> Any:
        gradient = backward().coalesce()
        return gradient.indices()[0], gradient.values()

    return {
        "embedding_bag_coalesce": by_coalesce,
        "unique_index_add": torch.no_grad()(by_unique),
    }


def _table_gradient(torch: Any, given: Any) -> dict[str, Any]:
    def by_index_add() -> Any:
        table = given["table"]
        parts = given["weights"][..., None] * given["cotangent"][:, None]
        sums = torch.zeros_like(table)
        width = table.shape[1]
        return sums.index_add_(0, given["ids"].reshape(-1), parts.reshape(-1, width))

    return {
        "embedding_bag": _pulled_back(torch, given, "table", sparse=False),
        "index_add": torch.no_grad()(by_index_add),
    }
