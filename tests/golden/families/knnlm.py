"""Family knnlm: neighbours' probabilities, their mixture with a model, gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from memjax.ops.knn import (
    interpolate,
    knn_log_probs,
    knn_probs,
    knn_weights,
    target_log_probs,
)
from tests.golden.case import Case

_ARRAYS = {
    "in.distances",
    "in.neighbor_values",
    "in.lm_log_probs",
    "in.targets",
    "knn_weights",
    "knn_probs",
    "probs",
    "target_in_neighbors",
    "ref_knn_log_prob_of_target",
    "ref_combined_log_prob_of_target",
    "nll",
    "grad.distances",
    "grad.lm_log_probs",
}


def run(case: Case) -> None:
    case.expect_arrays(_ARRAYS)
    settings, data = case.settings, case.data
    dtype = case.manifest.entries[case.name]["compute_dtype"]
    distances_NK = jnp.asarray(data["in.distances"], dtype)
    lm_NV = jnp.asarray(data["in.lm_log_probs"], dtype)
    values_NK, targets_N = data["in.neighbor_values"], data["in.targets"]
    n, vocab_size = settings.take("N"), settings.take("vocab")
    assert distances_NK.shape == values_NK.shape == (n, settings.take("k"))
    assert lm_NV.shape == (n, vocab_size)
    lam, temperature = settings.take("lambda"), settings.take("temperature")

    case.close("knn_weights", knn_weights(distances_NK, temperature))
    probs_NV = knn_probs(distances_NK, values_NK, vocab_size, temperature)
    case.close("knn_probs", probs_NV)

    def nll(distances_NK: jax.Array, lm_NV: jax.Array) -> tuple[jax.Array, jax.Array]:
        knn_NV = knn_log_probs(distances_NK, values_NK, vocab_size, temperature)
        mixed_NV = interpolate(lm_NV, knn_NV, lam)
        picked_N = mixed_NV[jnp.arange(n), targets_N]
        return -jnp.mean(picked_N), mixed_NV

    graded = jax.value_and_grad(nll, argnums=(0, 1), has_aux=True)
    (loss, mixed_NV), (grad_distances, grad_lm) = graded(distances_NK, lm_NV)
    case.close("nll", loss[None])
    case.close("probs", jnp.exp(mixed_NV))
    case.close("grad.distances", grad_distances)
    case.close("grad.lm_log_probs", grad_lm)

    target_N = target_log_probs(distances_NK, values_NK, targets_N, temperature)
    held_N = np.isfinite(target_N)
    case.equal("target_in_neighbors", held_N)
    # Where the target is absent the reference has about -10000, and we have -inf.
    recorded_N = data["ref_knn_log_prob_of_target"]
    assert np.all(recorded_N[~held_N] < -9000)
    of_held = target_N[held_N], recorded_N[held_N]
    case.close("ref_knn_log_prob_of_target", *of_held)
    lm_target_N = lm_NV[jnp.arange(n), targets_N]
    mixed_N = interpolate(lm_target_N, target_N, lam)
    case.close("ref_combined_log_prob_of_target", mixed_N)
