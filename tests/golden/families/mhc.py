"""Family mhc: mixing weights of M streams, one sub-block around them, all gradients."""

from typing import Any

import jax
import jax.numpy as jnp

from memjax.layers.hyper_connections import HyperConnection
from memjax.ops.hyper_connections import Mixing, collapse, merge, stream_mixes
from tests.golden.case import Case
from tests.golden.families.fwd import dtypes_of

_LOSS = (
    "sum(layer_input*cot_layer_input)+sum(output*cot_output); "
    "pre is applied to x of the same sub-block here"
)
_PARAMS = {"kernel": "hc_fn", "scale": "hc_scale", "base": "hc_base"}
_INPUTS = {"x", "sublayer_out", *_PARAMS.values()}
_OUTPUTS = {"mixes", "pre", "post", "comb", "layer_input", "output"}
_SUMS = {"comb_row_sums": -1, "comb_col_sums": -2}


def run(case: Case) -> None:
    case.expect_arrays(
        _INPUTS
        | _OUTPUTS
        | set(_SUMS)
        | {"cot_layer_input", "cot_output"}
        | {f"grad_{name}" for name in _INPUTS}
    )
    settings, data = case.settings, case.data
    settings.take("loss", one_of=(_LOSS,))
    settings.number("fn_scale", 0.0, float("inf"))  # how hc_fn was drawn
    dtype = settings.take("dtype", default=case.dtype)
    assert dtype == case.dtype, "settings.dtype is not the file's"
    n_streams, norm_eps = settings.take("hc_mult"), settings.take("norm_eps")
    assert data["x"].shape[2:] == (n_streams, settings.take("hidden_size"))
    layer = HyperConnection(
        n_streams=n_streams,
        n_iterations=settings.take("iters"),
        eps=settings.take("hc_eps"),
        norm_eps=norm_eps,
        dtypes=dtypes_of(case),
    )
    params = jax.tree.map(jnp.asarray, _tree(data, ""))

    def loss(params: Any, x: jax.Array, out: jax.Array) -> Any:
        mix: Any = layer.apply({"params": params}, x)
        assert isinstance(mix, Mixing)
        layer_input = collapse(x, mix.pre)
        output = merge(x, out, mix.post, mix.comb)
        total = jnp.sum(layer_input * data["cot_layer_input"])
        total += jnp.sum(output * data["cot_output"])
        mixes = stream_mixes(x, params["kernel"], norm_eps)
        return total, (mixes, mix, layer_input, output)

    x, out = jnp.asarray(data["x"]), jnp.asarray(data["sublayer_out"])
    graded = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, found), (grads, grad_x, grad_out) = graded(params, x, out)
    mixes, mix, layer_input, output = found
    got = {"mixes": mixes, "layer_input": layer_input, "output": output}
    for name, value in (got | mix._asdict()).items():
        case.close(name, value)
    for name, axis in _SUMS.items():
        case.close(name, jnp.sum(mix.comb, axis=axis))
    case.close("grad_x", grad_x)
    case.close("grad_sublayer_out", grad_out)
    for name, want in _tree(data, "grad_").items():
        case.close(f"grad of {name}", grads[name], want)


def _tree(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    tree = {name: data[prefix + theirs] for name, theirs in _PARAMS.items()}
    return tree | {"kernel": tree["kernel"].T}
