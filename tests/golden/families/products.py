"""Recorded product-key memories: one call, and every gradient that was recorded.

What: `Arrays` hands out a case's arrays and knows which nobody asked for; `reproduce`
    runs `ProductKeyMemory` and compares.
Why: the families differ in names and settings, not in how a layer is run.
When not: what a family's settings mean stands in its own file.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from memjax.layers.memory import MemoryInputs
from memjax.layers.product_key import CONSTANTS, ProductKeyMemory
from memjax.layers.product_key_config import ProductKeyConfig
from memjax.layers.record import METRICS
from memjax.ops.product_keys import Selection
from tests.golden.case import Case
from tests.golden.families.fwd import dtypes_of

_STATS = "batch_stats"
# What the recorded names mean here: (class, method) whose result they are.
_TAPPED = {
    "query": ("QueryNetwork", "__call__"),
    "raw_scores": ("ProductKeyMemory", "select"),
    "scores": ("ProductKeyMemory", "weigh"),
}
Flat = dict[str, np.ndarray]


class Arrays:
    """Arrays of a case in the dtype that it was computed in."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.case.data

    def __getitem__(self, name: str) -> np.ndarray:
        self._used.add(name)
        found = self.case.data[name]
        return found if found.dtype.kind == "i" else found.astype(self.case.dtype)

    def done(self) -> None:
        self.case.expect_arrays(self._used)


def reproduce(
    arrays: Arrays,
    config: ProductKeyConfig,
    flat_of: Callable[[str], Flat],
    *,
    stats_of: Callable[[str], Flat] = lambda prefix: {},
    constants: Flat | None = None,
    train: bool = False,
) -> None:
    """Compare what a case recorded of one call of the layer.

    Args:
        flat_of: prefix ("param." or "grad.") -> {path of our parameter: array}; a
            gradient may be missing where the parameter is not learned.
        stats_of: the same for running averages ("buffer." and "buffer_after.").
    """
    case = arrays.case
    layer = ProductKeyMemory(config, dtypes_of(case))
    x, bar = arrays["x"], arrays["grad_out"]
    lead, (batch, steps) = x.shape[:-1], (-1, x.shape[-2])
    x = jnp.asarray(x.reshape(batch, steps, x.shape[-1]))
    ones = jnp.ones(x.shape[:2], jnp.int32)
    inputs = MemoryInputs(ones, jnp.cumsum(ones, axis=1) - 1)
    variables = {
        _STATS: _nested(stats_of("buffer.")),
        CONSTANTS: constants or {},
    }
    taps = {name: jnp.zeros((), x.dtype) for name in _TAPPED}

    def called(params: Any, x: jax.Array, taps: Any) -> Any:
        seen: dict[str, Any] = {}
        with nn.intercept_methods(_interceptor(seen, taps)):
            out, state = layer.apply(
                {"params": params, **variables},
                x,
                inputs,
                train=train,
                method="read",
                mutable=[METRICS, _STATS],
            )
        return jnp.sum(out * bar.reshape(out.shape)), (out, state, seen)

    @jax.jit
    def graded(params: Any, x: jax.Array) -> Any:
        shapes = jax.eval_shape(called, params, x, taps)[1][2]
        zeros = {
            name: jnp.zeros(shapes[name].shape, x.dtype)
            for name in _TAPPED
            if name in shapes
        }
        grad = jax.grad(called, argnums=(0, 1, 2), has_aux=True)
        return grad(params, x, taps | zeros)

    params = jax.tree.map(jnp.asarray, _nested(flat_of("param.")))
    (grads, x_bar, tap_bars), (out, state, seen) = graded(params, x)
    case.close("out", np.reshape(out, arrays["out"].shape))
    _check_x(arrays, config, np.reshape(x_bar, (*lead, -1)))
    got, want = _flattened(grads), flat_of("grad.")
    if train and config.query_norm == "batch":
        got, want = _join_biases(got), _join_biases(want)
    _check_gradients(case, got, want)
    if config.k is not None:
        seen["indices"] = state[METRICS]["slots"]
        _check_read(arrays, seen, tap_bars)
    want = stats_of("buffer_after.") if train else stats_of("buffer.")
    got = _flattened(state.get(_STATS, {}))
    assert set(got) == set(want), "running averages"
    for path, leaf in want.items():
        case.close(f"{path} after", got[path], leaf)


def _interceptor(seen: dict[str, Any], taps: Any) -> Callable[..., Any]:
    names = {place: name for name, place in _TAPPED.items()}

    def add_tap(call: Any, args: Any, options: Any, context: Any) -> Any:
        value = call(*args, **options)
        place = type(context.module).__name__, context.method_name
        name = names.get(place)
        if name is None:
            return value
        if isinstance(value, Selection):
            seen["raw_indices"] = value.slots
            seen[name] = value.scores + taps[name]
            return Selection(seen[name], value.slots)
        seen[name] = value + taps[name]
        return seen[name]

    return add_tap


def _check_x(arrays: Arrays, config: ProductKeyConfig, x_bar: np.ndarray) -> None:
    if config.detach_input and "grad.x" not in arrays:
        assert not x_bar.any(), "a detached input has a gradient"
    else:
        arrays.case.close("grad.x", x_bar, arrays["grad.x"])


def _check_gradients(case: Case, got: Flat, want: Flat) -> None:
    for path, leaf in got.items():
        if path.startswith("fixed_"):
            assert not np.any(leaf), f"{path} is not learned and has a gradient"
        else:
            assert path in want, f"no recorded gradient of {path}"
            case.close(f"grad of {path}", leaf, want[path])
    assert set(want) <= set(got), "parameters differ"


def _join_biases(flat: Flat) -> Flat:
    """Each kernel of a query network with its bias in one array.

    A batch norm in training takes away what a bias adds: its gradient is 0, recorded as
    rounding that is measured here by the gradient of the whole linear map.
    """
    joined = {path: leaf for path, leaf in flat.items() if "/bias_" not in path}
    for path, leaf in flat.items():
        if "/bias_" in path:
            kernel = path.replace("/bias_", "/kernel_")
            parts = [joined[kernel], leaf[..., None, :]]
            joined[kernel] = np.concatenate(parts, axis=-2)
    return joined


def _check_read(arrays: Arrays, seen: Any, tap_bars: Any) -> None:
    """Slots, scores and weights, matched slot by slot in each head of each token."""
    case = arrays.case
    if "query" in arrays:
        shape = arrays["query"].shape
        case.close("query", np.reshape(seen["query"], shape))
        case.close(
            "grad.query", np.reshape(tap_bars["query"], shape), arrays["grad.query"]
        )
    raw = "raw_indices" if "raw_indices" in arrays else "indices"
    shape = (-1, *seen["raw_indices"].shape[-2:])
    theirs = np.argsort(arrays[raw].reshape(shape), axis=-1)
    ours = np.argsort(np.reshape(seen[raw], shape), axis=-1)

    def compare(check: Callable[..., None], name: str, got: Any) -> None:
        if name in arrays:
            want = np.take_along_axis(arrays[name].reshape(shape), theirs, axis=-1)
            got = np.take_along_axis(np.reshape(got, shape), ours, axis=-1)
            check(name, got, want)

    for name in ("raw_indices", "indices"):
        compare(case.equal, name, seen[name])
    for name in ("raw_scores", "scores"):
        compare(case.close, name, seen[name])
        compare(case.close, f"grad.{name}", tap_bars[name])


def _nested(flat: Flat) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = leaf
    return tree


def _flattened(tree: Any) -> Flat:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
