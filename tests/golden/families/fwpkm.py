"""Family fwpkm: fast-weight product keys, the memory alone and the whole layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.layers.fast_weight import FAST_WEIGHTS, FastWeightMemory, l2_norm, z_score
from memjax.layers.fast_weight_config import FastWeightConfig
from memjax.layers.memory import MemoryInputs
from memjax.layers.record import METRICS
from memjax.ops.fast_weight_chunk import FastWeightOptions, FastWeights
from memjax.ops.fast_weights import Trace, fast_weight_shared
from tests.golden.case import Case
from tests.golden.families.fwd import dtypes_of
from tests.golden.families.memory_reads import array, linear

_SCORES = {"idw": "idw", "dot_product": "dot"}
_BOTH = (False, True)
_QUERY = {None: "none", "l2norm": "l2", "zero_mean": "zscore", "zscore": "zscore"}
_LINEARS = {"query": "q", "value": "v", "token_gate": "gate", "out": "out"}


def run(case: Case) -> None:
    (_run_layer if "d_model" in case.settings else _run_memory)(case)


def _options(case: Case) -> FastWeightOptions:
    take = case.settings.take
    # How far the two recorded computations agreed, and how they were run.
    for name in ("agreement_with_independent_transcription", "gradient_agreement"):
        take(name, default={})
    take("training", default=True, one_of=_BOTH)
    weight = take("addr_loss_weight", default=1.0)
    if "addr_loss" in case.settings:
        loss = take("addr_loss", one_of=("me", None))
        weight = weight if loss else None
    return FastWeightOptions(
        k=take("topk"),
        chunk=take("chunk_size"),
        lookahead=take("lookahead"),
        score=_SCORES[take("qk_score_type", default="idw", one_of=_SCORES)],
        activation=take("score_nonlinear", default="softmax"),
        temperature=take("score_temperature", default=1.0),
        learning_rate=take("learning_rate"),
        weight_decay=take("weight_decay", default=0.0),
        grad_clip=take("grad_clip", default=False, one_of=_BOTH),
        address_weight=weight,
        values_only=take("mem_grad_to_values_only", default=True, one_of=_BOTH),
    )


def _shape_of_keys(case: Case) -> tuple[int, int, int, int]:
    take = case.settings.take
    return take("heads"), 2, take("n_subkeys"), take("k_dim") // 2


def _check_sizes(case: Case, array_name: str, *width: str) -> None:
    sizes = [case.settings.take(key) for key in ("batch", "tokens", *width)]
    assert list(case.data[array_name].shape) == sizes, f"{array_name}: settings differ"


def _run_memory(case: Case) -> None:
    options, settings = _options(case), case.settings
    gated = settings.take("gates", one_of=_BOTH)
    masked = settings.take("loss_mask", one_of=_BOTH)
    _check_sizes(case, "in.ref_v", "v_dim")
    shape = _shape_of_keys(case)
    starts = range(0, settings.take("tokens"), options.chunk)
    inputs = {
        "keys": array(case, "param.keys").reshape(shape),
        "values": array(case, "param.values"),
        "q": array(case, "in.q"),
        "ref_v": array(case, "in.ref_v"),
    }
    if gated:
        inputs["gates"] = array(case, "in.gates")
    exact = "grad_exact." if "grad_exact.q" in case.data else "grad."
    assert options.values_only or exact != "grad.", "gradients are not exact"
    known = {"in." + name for name in ("q", "ref_v")}
    known |= {"param.keys", "param.values", "grad_out", "out", "indices", "scores"}
    known |= {"inner_losses", "addr_loss_per_chunk"}
    known |= {"in.gates"} if gated else set()
    known |= {"in.loss_mask"} if masked else set()
    known |= {kind + name for kind in ("grad.", exact) for name in inputs}
    for n in range(1, len(starts) + 1):
        known |= {f"state{n}.keys", f"state{n}.values"}
    case.expect_arrays(known)
    mask = case.data["in.loss_mask"] > 0 if masked else None

    def memory(inputs: dict[str, Any], mask: Any) -> Any:
        return fast_weight_shared(
            FastWeights(inputs["keys"], inputs["values"]),
            inputs["q"],
            inputs["ref_v"],
            inputs.get("gates"),
            options,
            mask=mask,
        )

    def loss(inputs: dict[str, Any]) -> Any:
        out, _, trace = memory(inputs, mask)
        return jnp.sum(out * array(case, "grad_out")), (out, trace)

    graded = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, (out, trace)), grads = graded(jax.tree.map(jnp.asarray, inputs))
    case.close("out", out)
    _check_trace(case, trace)
    if "addr_loss_per_chunk" in case.data:
        case.close("addr_loss_per_chunk", trace.address_M)
    for name, got in grads.items():
        if settings.take("training", default=True) or exact + name in case.data:
            want = case.data[exact + name]
            case.close(f"grad of {name}", jnp.reshape(got, want.shape), want)
    state = {name: inputs.pop(name) for name in ("keys", "values")}
    by_chunk = jax.jit(memory)
    for n, start in enumerate(starts, start=1):
        chunk, chunk_mask = jax.tree.map(
            lambda x, a=start: x[:, a : a + options.chunk], (inputs, mask)
        )
        _, after, _ = by_chunk(state | chunk, chunk_mask)
        state = {"keys": after.keys_HXNC, "values": after.values_SW}
        _check_state(case, f"state{n}.", after)


def _check_state(case: Case, prefix: str, state: FastWeights) -> None:
    keys = case.data[prefix + "keys"]
    case.close(prefix + "keys", jnp.reshape(state.keys_HXNC, keys.shape))
    case.close(prefix + "values", state.values_SW)


def _check_trace(case: Case, trace: Trace) -> None:
    """Slots, their weights (recorded as scores) and the losses of the pairs."""
    _check_read(case, trace.reads.slots, trace.reads.weights)
    case.close("inner_losses", trace.losses_BP)


def _check_read(case: Case, slots: Any, weights: Any) -> None:
    # Scores closer than their rounding may change places.
    ours = np.argsort(np.asarray(slots), axis=-1)
    theirs = np.argsort(case.data["indices"], axis=-1)

    def pair(name: str, got: Any) -> tuple[str, np.ndarray, np.ndarray]:
        got = np.take_along_axis(np.asarray(got), ours, axis=-1)
        return name, got, np.take_along_axis(case.data[name], theirs, axis=-1)

    case.equal(*pair("indices", slots))
    case.close(*pair("scores", weights))


def _run_layer(case: Case) -> None:
    options, settings = _options(case), case.settings
    _check_sizes(case, "x", "d_model")
    shape = _shape_of_keys(case)
    config = FastWeightConfig(
        n_sub_keys=shape[2],
        key_width=settings.take("k_dim"),
        value_width=settings.take("v_dim"),
        n_heads=shape[0],
        gated_loss=settings.take("weight_loss_with_gates", one_of=_BOTH),
        query_norm=_QUERY[settings.take("compress_query", one_of=_QUERY)],
        target_zscore=settings.take("compress_value", one_of=("zero_mean", None))
        == "zero_mean",
        fuse="convex" if settings.take("out_fuse_gate", one_of=_BOTH) else "sum",
        norm_eps=settings.take("rms_norm_eps"),
        gate_outputs=len(case.data["param.gate.bias"]),
        state="shared",
        initial="fixed",
        **vars(options),
    )
    case.expect_arrays(_known())
    layer = FastWeightMemory(config, dtypes_of(case))
    x, bar = jnp.asarray(array(case, "x")), array(case, "grad_out")
    inputs = MemoryInputs(jnp.ones(x.shape[:2], jnp.int32), jnp.zeros(x.shape[:2]))

    def loss(variables: Any, x: jax.Array) -> Any:
        read, state = layer.apply(
            variables,
            x,
            inputs,
            train=True,
            method="read",
            mutable=[METRICS, FAST_WEIGHTS],
            capture_intermediates=True,
        )
        return jnp.sum((x + read) * bar), (x + read, state)

    graded = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    variables = jax.tree.map(jnp.asarray, _tree(case, "param.", shape))
    (_, (out, state)), (grads, grad_x) = graded(variables, x)
    case.close("out", out)
    case.close("grad.x", grad_x)
    want = _tree(case, "grad.", shape)
    assert jax.tree.structure(grads) == jax.tree.structure(want)
    for (path, got), leaf in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(want), strict=True
    ):
        case.close(f"grad of {jax.tree_util.keystr(path)}", got, leaf)
    _check_state(case, "final.", FastWeights(**_named(state[FAST_WEIGHTS])))
    records = state[METRICS]
    _check_read(case, records["slots"], records["weights"])
    case.close("gates", records["gate"][..., None])
    mean = np.asarray(case.data["inner_losses"].mean())
    case.close("mean of inner_losses", records["inner_loss"], mean)
    _check_inside(case, config, variables, state["intermediates"])


def _check_inside(
    case: Case, config: FastWeightConfig, variables: Any, called: Any
) -> None:
    """What the layer handed to the memory, and got."""

    def given(name: str) -> jax.Array:
        return called[name]["__call__"][0]

    q, v = given("query"), given("value")
    halves = q.reshape(*q.shape[:-1], 2, -1)
    norms = {"l2": l2_norm, "zscore": z_score}
    if config.query_norm in norms:
        q = norms[config.query_norm](halves).reshape(q.shape)
    v = z_score(v) if config.target_zscore else v
    gate = jax.nn.sigmoid(given("token_gate").mean(-1))
    memory = FastWeights(**_named(variables[FAST_WEIGHTS]))
    weigh = gate if config.gated_loss else None
    found, _, trace = jax.jit(fast_weight_shared, static_argnums=4)(
        memory, q, v, weigh, config.options
    )
    g = gate[..., None]
    mixed = g * found + (1 - g) * v if config.fuse == "convex" else found + v
    for name, got in (
        ("query", q),
        ("target_values", v),
        ("retrieved", found),
        ("mixed", mixed),
    ):
        case.close(name, got)
    _check_trace(case, trace)


def _named(state: dict[str, Any]) -> dict[str, Any]:
    return {"keys_HXNC": state["keys"], "values_SW": state["values"]}


def _tree(case: Case, prefix: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Recorded arrays, or their gradients, as our variables."""
    params = {}
    for ours, theirs in _LINEARS.items():
        gain = array(case, f"{prefix}{theirs}_norm.weight")
        # Recorded less 1.
        params[f"{ours}_norm"] = {"scale": gain + (prefix == "param.")}
        named = theirs if theirs == "gate" else theirs + "_proj"
        params[ours] = linear(case, prefix + named)
    memory = {
        "keys": array(case, prefix + "fwpkm.keys").reshape(shape),
        "values": array(case, prefix + "fwpkm.values"),
    }
    return {"params": params, FAST_WEIGHTS: memory}


def _known() -> set[str]:
    known = {"x", "grad_out", "out", "query", "target_values", "gates", "retrieved"}
    known |= {"mixed", "indices", "scores", "inner_losses", "grad.x"}
    known |= {"final.keys", "final.values"}
    leaves = {"fwpkm.keys", "fwpkm.values"}
    for theirs in _LINEARS.values():
        named = theirs if theirs == "gate" else theirs + "_proj"
        leaves |= {f"{theirs}_norm.weight", f"{named}.weight", f"{named}.bias"}
    return known | {kind + leaf for kind in ("param.", "grad.") for leaf in leaves}
