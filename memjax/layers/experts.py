"""A mixture of SwiGLU experts in the place of a feed-forward.

What: `Experts`, learned or hash routing over E feed-forwards, with a shared one beside
    them if wanted, and its config.
Why: the baseline of memory layers: parameters that most tokens do not use.
When not: thousands of one-neuron experts are `layers.peer`; the tables of hash routing
    are built by `ops.hash_routing`.
"""

from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from memjax.arrays import check_shape
from memjax.errors import ConfigError, ShapeError
from memjax.layers.feed_forward import FeedForward
from memjax.layers.memory import check_numbers
from memjax.layers.precision import Dtypes
from memjax.layers.projection import projection
from memjax.layers.record import add_loss, record
from memjax.ops.grouped_matmul import grouped_matmul
from memjax.ops.hash_routing import (
    balanced_table,
    bigram_layout,
    random_table,
    sliced_table,
)
from memjax.ops.ngram_layout import NgramLayout
from memjax.ops.routing import (
    SCORES,
    Routing,
    balance_loss,
    check_choice,
    choose_experts,
    combine_experts,
    dispatch,
    expert_load,
    given_experts,
    routing_scores,
)

TABLE_ROUTINGS = ("random", "balanced", "sliced")
ROUTINGS = ("learned", *TABLE_ROUTINGS, "bigram")
WEIGHTS = ("scores", "uniform")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Options of a mixture of experts.

    Attributes:
        n_experts: E.
        top_k: experts of a token, 1 to E.
        d_ff: inner width F of each expert.
        shared_d_ff: inner width of a feed-forward that every token passes as well; 0:
            none.
        routing: "learned": the top_k of largest score; or by the token alone, through
            `ops.hash_routing`: "random", "balanced", "sliced", "bigram".
        hash_seed: of the routings with a random table or a hash.
        weights: "scores": of the chosen experts, by a learned gate, hash routing
            included (DeepSeek-V4); "uniform": 1 / top_k each, without a gate
            (arXiv:2106.04426; only with hash routing).
        scores: one of `ops.routing.SCORES`.
        normalize: scores of the chosen experts are divided by their sum. With top_k = 1
            that would leave nothing to learn and is refused.
        route_scale: factor on the weights.
        balance_weight: weight of the balance loss of a learned routing in the training
            loss (arXiv:2101.03961 has 0.01); 0: none, and experts may collapse. Hash
            routing has no such loss: there the default and 0 say the same, and all
            else is refused.
    """

    n_experts: int = 8
    top_k: int = 2
    d_ff: int = 128
    shared_d_ff: int = 0
    routing: str = "learned"
    hash_seed: int = 0
    weights: str = "scores"
    scores: str = "softmax"
    normalize: bool = True
    route_scale: float = 1.0
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        check_numbers(self, "experts")
        for field, allowed in (
            ("routing", ROUTINGS),
            ("weights", WEIGHTS),
            ("scores", SCORES),
            ("normalize", (False, True)),
        ):
            if getattr(self, field) not in allowed:
                self._refuse(field, f"one of {allowed}")
        for field, least in (
            ("n_experts", 1),
            ("d_ff", 1),
            ("shared_d_ff", 0),
            ("hash_seed", 0),
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                self._refuse(field, f"an integer >= {least}")
        check_choice(self.n_experts, self.top_k, "experts.top_k")
        if not 0 < self.route_scale < float("inf"):
            self._refuse("route_scale", "a finite number > 0")
        if not 0 <= self.balance_weight < float("inf"):
            self._refuse("balance_weight", "a finite number >= 0")
        default = type(self).balance_weight
        if self.routing != "learned" and self.balance_weight not in (0, default):
            self._refuse("balance_weight", f"0 or {default} when routing is by a hash")
        if self.routing in ("learned", "balanced") and self.hash_seed:
            self._refuse("hash_seed", f"0 when routing = {self.routing!r}")
        if self.routing == "sliced" and self.n_experts % self.top_k:
            self._refuse(
                "n_experts", f"a multiple of top_k = {self.top_k} for routing 'sliced'"
            )
        if self.weights == "uniform":
            self._check_uniform()
        elif self.normalize and self.top_k == 1 < self.n_experts:
            self._refuse(
                "normalize",
                "False when top_k = 1: a single weight divided by itself is 1, and "
                "nothing would train the gate (or weights = 'uniform')",
            )

    def _check_uniform(self) -> None:
        if self.routing == "learned":
            self._refuse("weights", "'scores' when routing = 'learned'")
        if self.scores != "softmax":
            self._refuse(
                "scores", "'softmax' when weights = 'uniform': there is no gate"
            )
        if not self.normalize:
            self._refuse("normalize", "True when weights = 'uniform'")

    def _refuse(self, field: str, allowed: str) -> None:
        raise ConfigError(f"experts.{field}", getattr(self, field), allowed)

    def table(self, vocab_size: int, counts_V: Any = None) -> np.ndarray:
        """The host table int32 [V, K] of a routing by a table.

        Args:
            counts_V: how often each token occurs in the training text, for "balanced".

        Raises:
            ConfigError: the routing has no table, or is "balanced" without counts.
            ShapeError: the counts are not of this vocabulary.
        """
        if self.routing not in TABLE_ROUTINGS:
            self._refuse("routing", f"one of {TABLE_ROUTINGS} for a table")
        if self.routing == "balanced":
            if counts_V is None:
                raise ConfigError("counts_V", None, "counts when routing = 'balanced'")
            check_shape("counts_V", np.asarray(counts_V), (vocab_size,))
            return balanced_table(counts_V, self.n_experts, self.top_k)
        build = random_table if self.routing == "random" else sliced_table
        return build(vocab_size, self.n_experts, self.top_k, seed=self.hash_seed)

    def layout(self, vocab_size: int, pad_id: int, layer_id: int = 0) -> NgramLayout:
        """The numbers of the hash of the routing "bigram"; ConfigError otherwise."""
        if self.routing != "bigram":
            self._refuse("routing", "'bigram' for a layout")
        return bigram_layout(
            vocab_size=vocab_size,
            pad_id=pad_id,
            n_experts=self.n_experts,
            k=self.top_k,
            seed=self.hash_seed,
            layer_id=layer_id,
        )


class _Kernels(nn.Module):
    """E matrices, [E, in, out], drawn like those of `projection`."""

    shape: tuple[int, int, int]
    dtypes: Dtypes
    scale: float = 1.0

    @nn.compact
    def __call__(self) -> Array:
        init = nn.initializers.variance_scaling(
            self.scale**2, "fan_in", "truncated_normal", batch_axis=(0,)
        )
        kernel = self.param("kernel", init, self.shape, self.dtypes.params)
        return kernel.astype(self.dtypes.compute)


class Experts(nn.Module):
    """Mixture of SwiGLU experts, [B, T, D] -> [B, T, D] in the compute dtype.

    out = sum over the chosen experts of weight * expert(h), + shared(h). No token is
    dropped and no capacity is set: tokens are sorted by expert. Router, scores and the
    weighted sum are in the accumulation dtype. With n_experts = 1 and weight 1 it is
    `FeedForward` with the same kernels.

    Parameters: `gate/kernel`, `up/kernel` [E, D, F] and `out/kernel` [E, F, D];
    `router/kernel` [D, E] unless weights are uniform; `shared`, a `FeedForward`.

    Records `load` (int32 [E], pairs of a real token and its expert), `load_ratio`
    (largest over mean load, 0 without tokens), and for learned routing `balance_loss`
    (`ops.routing.balance_loss`), which is added to the training loss with its weight.

    Attributes:
        out_scale: as in `FeedForward`.

    Sources: arXiv:2101.03961 (balance loss), arXiv:2106.04426 (hash routing), and the
    gate of DeepSeek-V4 as public ports read it (sqrt_softplus, route_scale, learned
    weights of hashed experts). Differs: no capacity, and no selection bias.
    """

    config: ExpertsConfig
    dtypes: Dtypes
    out_scale: float = 1.0

    @nn.compact
    def __call__(
        self,
        h_BTD: Array,
        mask_BT: Array | None = None,
        expert_ids_BTK: Array | None = None,
    ) -> Array:
        """The branch of the block.

        Args:
            h_BTD: normalised stream.
            mask_BT: bool; False is padding, which counts in no load and comes out as
                the shared expert's output alone. None: all tokens are real.
            expert_ids_BTK: int32 [B, T, K], for hash routing only. A real token with an
                index outside [0, E) comes out as NaN.

        Raises:
            ShapeError: ids are missing, or given to a learned routing, or do not fit.
        """
        config, (*lead, d_model) = self.config, h_BTD.shape
        n_experts, d_ff, acc = config.n_experts, config.d_ff, self.dtypes.accumulation
        if mask_BT is not None:
            check_shape("mask_BT", mask_BT, tuple(lead))
        routing = self._route(h_BTD, mask_BT, expert_ids_BTK)
        weights = routing.weights.astype(acc)
        if mask_BT is not None:
            weights = jnp.where(mask_BT[..., None], weights, 0)

        def kernels(name: str, n_in: int, n_out: int, scale: float = 1.0) -> Array:
            return _Kernels((n_experts, n_in, n_out), self.dtypes, scale, name=name)()

        x_ND = h_BTD.reshape(-1, d_model).astype(self.dtypes.compute)
        sent = dispatch(x_ND, routing.experts.reshape(-1, config.top_k), n_experts)
        gate, up = (
            grouped_matmul(sent.x_PD, kernels(name, d_model, d_ff), sent.sizes_E)
            for name in ("gate", "up")
        )
        out = kernels("out", d_ff, d_model, self.out_scale)
        y_PD = grouped_matmul(nn.silu(gate) * up, out, sent.sizes_E)
        y_ND = combine_experts(y_PD, sent, weights.reshape(-1, config.top_k))
        y_BTD = y_ND.reshape(h_BTD.shape).astype(self.dtypes.compute)
        if config.shared_d_ff:
            shared = FeedForward(
                config.shared_d_ff, self.dtypes, self.out_scale, name="shared"
            )
            y_BTD = y_BTD + shared(h_BTD)
        return y_BTD

    def _route(
        self, h_BTD: Array, mask_BT: Array | None, expert_ids_BTK: Array | None
    ) -> Routing:
        config, n_experts = self.config, self.config.n_experts
        shape = (*h_BTD.shape[:-1], config.top_k)
        learned = config.routing == "learned"
        if learned != (expert_ids_BTK is None):
            got = () if expert_ids_BTK is None else tuple(expert_ids_BTK.shape)
            want = "None" if learned else shape
            raise ShapeError(
                "expert_ids", got, f"{want} for {config.routing!r} routing"
            )
        options = {"normalize": config.normalize, "scale": config.route_scale}
        scores = None
        if config.weights == "scores":
            wide = replace(self.dtypes, compute=self.dtypes.accumulation)
            logits = projection("router", n_experts, wide)(h_BTD)
            scores = routing_scores(logits, config.scores)
        if learned and scores is not None:
            routing = choose_experts(scores, config.top_k, **options)
            load = expert_load(routing.experts, n_experts, mask_BT)
            loss = balance_loss(scores, load, mask_BT)
            record(self, "balance_loss", loss)
            if config.balance_weight > 0:
                add_loss(self, "balance", config.balance_weight * loss)
        else:
            check_shape("expert_ids", expert_ids_BTK, shape)
            assert expert_ids_BTK is not None
            routing = given_experts(expert_ids_BTK, n_experts, scores, **options)
            load = expert_load(expert_ids_BTK, n_experts, mask_BT)
        mean = jnp.maximum(jnp.mean(load.astype(jnp.float32)), 1 / n_experts)
        record(self, "load", load)
        record(self, "load_ratio", jnp.max(load) / mean)
        return routing
