"""Family alg1: trajectories of the table optimizer, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from memjax.optim.sinkhorn_momentum import (
    scale_by_sinkhorn_momentum,
    sinkhorn_momentum,
)
from tests.golden.case import Case

_UPDATE = "W <- W - lr*gamma*delta"
_PER_STEP = ("params", "momentum", "delta")


def run(case: Case) -> None:
    settings = case.settings
    options = {
        "beta": settings.take("beta"),
        "n_iterations": settings.take("K"),
        "tau": settings.take("tau"),
        "eps": settings.take("eps"),
    }
    transform = scale_by_sinkhorn_momentum(**options)
    learn = sinkhorn_momentum(
        settings.take("lr"), gamma=settings.take("gamma"), **options
    )
    settings.take("update", default=_UPDATE, one_of=(_UPDATE,))
    _check_description(case)

    # In two stages, so that the direction can be compared before the rate.
    @jax.jit
    def step(params, grad, direction_state, state):
        delta, direction_state = transform.update(grad, direction_state, params)
        updates, state = learn.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        return params, delta, direction_state, state

    params = jnp.asarray(case.data["param_0"], case.dtype)
    direction_state, state = transform.init(params), learn.init(params)
    got = {name: [] for name in _PER_STEP}
    for grad in case.data["grads"]:
        params, delta, direction_state, state = step(
            params, jnp.asarray(grad, case.dtype), direction_state, state
        )
        for name, value in zip(
            _PER_STEP, (params, direction_state.momentum, delta), strict=True
        ):
            got[name].append(np.asarray(value))
    for name in set(_PER_STEP) & set(case.data):
        for t, value in enumerate(got[name]):
            case.close(f"{name} of step {t + 1}", value, case.data[name][t])
    if "row_kept" in case.data:
        case.equal("row_kept", np.any(np.stack(got["delta"]) != 0, axis=-1))


def _check_description(case: Case) -> None:
    """Settings that only say how the inputs were drawn must fit the inputs."""
    described = {"zero_rows", "tiny_rows"}
    # The norms of the look-ahead's rows have no public reader; row_kept tests them.
    case.expect_arrays(
        {"param_0", "grads", "row_kept", "row_norm", *_PER_STEP} | described
    )
    settings, shape = case.settings, case.data["param_0"].shape
    for key, want in zip(("rows", "cols"), shape, strict=True):
        assert settings.take(key, default=want) == want, f"settings.{key} differs"
    for key in described & set(settings.values):
        assert settings.take(key) == len(case.data[key]), f"settings.{key} differs"
    if "sparse" in settings:
        settings.number("sparse", 0.0, 1.0)
    settings.take("zero_col", default=False, one_of=(False, True))
