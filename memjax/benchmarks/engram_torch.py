"""The public demo's Engram layer in plain PyTorch.

What: `contender`, the other side of `engram`.
Why: its forward pass with the operations that PyTorch has for them, in two ways; the
    faster counts.
When not: without the extra `bench`.

Source: what is computed is arXiv:2601.07372 and class Engram of deepseek-ai/Engram
engram_demo_v1.py; the code is ours.
"""

from collections.abc import Callable
from typing import Any

from memjax.benchmarks.contender import Contender, Ready, torch_device, torch_peer
from memjax.benchmarks.engram import ADAM_EPS, LEARNING_RATE, EngramCase, arrays

KEY_EPS, CONV_EPS, DILATION, N_TAPS = 1.1920929e-07, 1e-5, 3, 4
COMPARED = ("value", "key_0", "conv", "key_norm")


def contender(**arguments: Any) -> Contender:
    """PyTorch's side."""
    case = EngramCase(**arguments)
    return Contender("torch", lambda: _ready(case))


class _Engram:
    """The layer: weights, inputs, and its forward pass."""

    def __init__(self, case: EngramCase) -> None:
        self.torch, self.case = torch_peer(), case
        given = arrays(case)

        def place(array: Any) -> Any:
            return self.torch.from_numpy(array).to(torch_device())

        # PyTorch's linear maps want [out, in], its convolutions [channels, 1, taps].
        self.weights = {name: place(x) for name, x in given["weights"].items()}
        for name in ("value", *(f"key_{m}" for m in range(case.n_branches))):
            self.weights[name] = self.weights[name].T.contiguous()
        self.weights["conv"] = self.weights["conv"].T.contiguous()[:, None]
        self.hidden, self.cotangent = place(given["hidden"]), place(given["cotangent"])
        self.ids, self.probe = place(given["ids"]).long(), place(given["probe"])

    def rows(self, sparse: bool) -> Any:
        """[B, T, C * W]."""
        embedding = self.torch.nn.functional.embedding
        return embedding(self.ids, self.weights["table"], sparse=sparse).flatten(-2)

    def forward(self, e: Any, convolve: Callable[[Any], Any]) -> Any:
        """stream + branch, [B, T, M, D], for rows [B, T, C * W]."""
        torch, w, width = self.torch, self.weights, self.case.width
        functional, norm = torch.nn.functional, torch.nn.functional.rms_norm
        gates = []
        for m in range(self.case.n_branches):
            key = functional.linear(e, w[f"key_{m}"], w[f"key_{m}_bias"])
            key = norm(key, (width,), w["key_norm"][m], KEY_EPS)
            query = norm(self.hidden[:, :, m], (width,), w["query_norm"][m], KEY_EPS)
            score = (key * query).sum(-1) / width**0.5
            score = score.abs().clamp_min(1e-6).sqrt() * score.sign()
            gates.append(score.sigmoid())
        value = functional.linear(e, w["value"], w["value_bias"])
        gated = torch.stack(gates, 2)[..., None] * value[:, :, None]
        normed = torch.cat(
            [
                norm(gated[:, :, m], (width,), w["conv_norm"][m], CONV_EPS)
                for m in range(self.case.n_branches)
            ],
            -1,
        )
        convolved = functional.silu(convolve(normed))
        return self.hidden + gated + convolved.view_as(gated)

    def conv1d(self, u: Any) -> Any:
        """As the demo: channels first, padded on both sides and cut."""
        n_tokens = u.shape[1]
        padding = (N_TAPS - 1) * DILATION
        out = self.torch.nn.functional.conv1d(
            u.transpose(1, 2),
            self.weights["conv"],
            padding=padding,
            dilation=DILATION,
            groups=u.shape[2],
        )
        return out[..., :n_tokens].transpose(1, 2).contiguous()

    def shifted(self, u: Any) -> Any:
        """The same as multiply-adds of the shifted input."""
        n_tokens = u.shape[1]
        padding = (N_TAPS - 1) * DILATION
        padded = self.torch.nn.functional.pad(u, (0, 0, padding, 0))
        out = 0
        for tap in range(N_TAPS):
            first = tap * DILATION
            weight = self.weights["conv"][:, 0, tap]
            out = out + padded[:, first : first + n_tokens] * weight
        return out

    def done(self) -> None:
        """Wait for the device."""
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def probed(self, rows: Any, sums: Any) -> Any:
        """One number for each row of the table."""
        found = self.torch.zeros(self.case.n_rows, device=sums.device)
        found[rows] = sums @ self.probe
        return found

    def named(self, of: dict[str, Any]) -> dict[str, Any]:
        """What is compared, in the layout of `arrays`."""
        found = {name: of[name] for name in COMPARED}
        for name in ("value", "key_0"):
            found[name] = found[name].T
        found["conv"] = found["conv"][:, 0].T
        return found


def _ready(case: EngramCase) -> Ready:
    layer = _Engram(case)
    make = {"forward": _forward, "backward": _backward, "step": _step}[case.part]
    ways = {"conv1d": layer.conv1d, "shifted": layer.shifted}
    calls, results = make(layer, ways)

    def outputs() -> dict[str, Any]:
        found = results(next(iter(calls.values()))())
        return {name: x.detach().cpu().numpy() for name, x in found.items()}

    return Ready(variants=calls, outputs=outputs)


def _forward(layer: _Engram, ways: dict[str, Any]) -> Any:
    def using(convolve: Any) -> Callable[[], Any]:
        def run() -> Any:
            with layer.torch.no_grad():
                y = layer.forward(layer.rows(sparse=False), convolve)
            layer.done()
            return y

        return run

    return {name: using(way) for name, way in ways.items()}, lambda y: {"y": y}


def _backward(layer: _Engram, ways: dict[str, Any]) -> Any:
    """The gradient of the table whole, or summed by unique row."""
    torch, case = layer.torch, layer.case
    table = layer.weights["table"]
    small = {n: x.requires_grad_() for n, x in layer.weights.items() if n != "table"}
    small["hidden"] = layer.hidden.requires_grad_()

    def using(convolve: Any) -> Callable[[], Any]:
        def run() -> Any:
            if case.form == "dense":
                table.requires_grad_()
                e = layer.rows(sparse=False)
                of = table
            else:
                e = layer.rows(sparse=False).requires_grad_()
                of = e
            loss = (layer.forward(e, convolve) * layer.cotangent).sum()
            grads = torch.autograd.grad(loss, [*small.values(), of])
            found = dict(zip([*small, "table"], grads, strict=True))
            if case.form == "rows":
                rows, place = torch.unique(layer.ids, return_inverse=True)
                sums = torch.zeros(len(rows), case.row_width, device=table.device)
                parts = found["table"].reshape(-1, case.row_width)
                found["table"] = (rows, sums.index_add_(0, place.reshape(-1), parts))
            layer.done()
            return found

        return run

    def results(found: dict[str, Any]) -> dict[str, Any]:
        if case.form == "dense":
            table_R = found["table"] @ layer.probe
        else:
            table_R = layer.probed(*found["table"])
        return layer.named(found) | {"hidden": found["hidden"], "table": table_R}

    return {name: using(way) for name, way in ways.items()}, results


def _step(layer: _Engram, ways: dict[str, Any]) -> Any:
    """Adam on everything: of the table whole, or SparseAdam."""
    torch, sparse = layer.torch, layer.case.form == "rows"
    weights = {name: x.requires_grad_() for name, x in layer.weights.items()}
    layer.hidden.requires_grad_()
    small = [x for name, x in weights.items() if name != "table"]
    options = {"lr": LEARNING_RATE, "eps": ADAM_EPS}
    optimizers = [torch.optim.Adam(small, fused=True, **options)]
    if sparse:
        optimizers.append(torch.optim.SparseAdam([weights["table"]], **options))
    else:
        optimizers.append(torch.optim.Adam([weights["table"]], fused=True, **options))
    before = {n: x.detach().clone() for n, x in layer.named(weights).items()}
    before_R = (weights["table"] @ layer.probe).detach()

    def using(convolve: Any) -> Callable[[], Any]:
        def run() -> Any:
            layer.hidden.grad = None
            for optimizer in optimizers:
                optimizer.zero_grad()
            y = layer.forward(layer.rows(sparse), convolve)
            (y * layer.cotangent).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            layer.done()
            return layer.hidden.grad

        return run

    def results(hidden: Any) -> dict[str, Any]:
        after = layer.named(weights)
        moved = {name: after[name] - before[name] for name in before}
        moved_R = weights["table"] @ layer.probe - before_R
        return moved | {"hidden": hidden, "table": moved_R}

    return {name: using(way) for name, way in ways.items()}, results
