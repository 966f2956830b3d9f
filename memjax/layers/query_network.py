"""From the stream to the queries of a product-key memory.

What: `QueryNetwork`, the five ways the references make queries of a stream.
Why: what a query is decides which slots can be found, so it is an ablation of its own.
When not: projections anywhere else; use `projection`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from memjax.errors import ConfigError, ShapeError
from memjax.layers.batch_norm import MaskedBatchNorm
from memjax.layers.precision import Dtypes

QUERIES = ("linear", "mlp", "per_head_half", "identity", "shuffled")
QUERY_NORMS = ("none", "batch", "layer")
QUERY_INITS = ("uniform", "xavier_uniform", "truncated_normal")


class QueryNetwork(nn.Module):
    """Queries [..., H, Q] of a stream [..., D], Q the width of a whole key.

    Attributes:
        kind: "linear": one linear map, columns ordered (head, half, place);
            "mlp": `hidden` layers first, ReLU between linear maps and not after the
            last; "per_head_half": an MLP of its own for each half of each head, in the
            order head 0 half 0, head 0 half 1, head 1 half 0; "identity": the stream
            for every head, D = Q; "shuffled": head 0 takes the stream, head a > 0 the
            stream cut into 2^(a+1) blocks, even blocks first, then odd ones.
        n_heads, key_width: H and Q.
        hidden: widths of the hidden layers of one MLP.
        use_bias: of the linear maps.
        init_rule: "uniform": U(-a, a) for weights and biases, a = in^-1/2, the default
            of the reference; "xavier_uniform", "truncated_normal" (deviation in^-1/2,
            as `projection`): biases zero.
        norm: "batch": `MaskedBatchNorm` after every linear map, the last one too
            (queries without a linear map have none);
            "layer": LayerNorm over each half of a query, one gain and bias for all
            (lucidrains/product-key-memory, eps 1e-5); "none".
        learned: False: no gradient reaches the parameters; it still goes through them
            to the stream.

    Parameters: `kernel_i` [in, out] and `bias_i` [out] for the linear map i, with a
    leading axis [2H] when kind is "per_head_half"; `norm_i` with `scale` and `bias`, or
    `norm_scale` and `norm_bias` [Q / 2].

    Source: facebookresearch/XLM query.py (arXiv:1907.05242): sizes "0,0" are "linear",
    "0,m,0" an "mlp" with hidden (m,), "" the identity; multi_query_net and grouped_conv
    are "per_head_half". Its convolutions over images and its residual, which no query
    network ever receives, are not here.
    """

    kind: str
    n_heads: int
    key_width: int
    dtypes: Dtypes
    hidden: tuple[int, ...] = ()
    use_bias: bool = True
    init_rule: str = "uniform"
    norm: str = "none"
    learned: bool = True

    @nn.compact
    def __call__(self, x: Array, mask: Array, *, train: bool) -> Array:
        """Queries of `x` [..., D].

        Args:
            mask: bool [...], real positions; batch norm alone looks at it.
            train: batch norm uses the statistics of the batch.

        Returns:
            [..., H, Q] in the compute dtype, or float32 and wider where normalised.

        Raises:
            ConfigError: unknown kind.
            ShapeError: D does not fit "identity" or "shuffled".
        """
        if self.kind in ("identity", "shuffled"):
            query = self._heads_of(x.astype(self.dtypes.compute))
        elif self.kind in ("linear", "mlp", "per_head_half"):
            query = self._mapped(x, mask, train)
        else:
            raise ConfigError("kind", self.kind, f"one of {QUERIES}")
        if self.norm == "layer":
            halves = query.reshape(*query.shape[:-1], 2, self.key_width // 2)
            normed = nn.LayerNorm(
                epsilon=1e-5,
                dtype=jnp.promote_types(query.dtype, jnp.float32),
                use_scale=False,
                use_bias=False,
                use_fast_variance=False,
            )(halves)
            shape = halves.shape[-1:]
            normed *= self._param("norm_scale", nn.initializers.ones, shape)
            normed += self._param("norm_bias", nn.initializers.zeros, shape)
            query = normed.reshape(query.shape)
        return query

    def _mapped(self, x: Array, mask: Array, train: bool) -> Array:
        lead = x.shape[:-1]
        n_nets = 2 * self.n_heads if self.kind == "per_head_half" else 1
        sizes = (*self.hidden, self.n_heads * self.key_width // n_nets)
        for i, size in enumerate(sizes):
            if i:
                x = nn.relu(x)
            x = self._linear(i, x, size, n_nets, split=i > 0)
            if self.norm == "batch":
                norm = MaskedBatchNorm(
                    param_dtype=self.dtypes.params,
                    learned=self.learned,
                    name=f"norm_{i}",
                )
                x = norm(x, mask, train=train)
        return x.reshape(*lead, self.n_heads, self.key_width)

    def _linear(self, i: int, x: Array, size: int, n_nets: int, split: bool) -> Array:
        """Map `x` [..., in], or [..., G, in] when split, of G = n_nets > 1 nets."""
        compute = self.dtypes.compute
        fan_in = x.shape[-1]
        nets = (n_nets,) if n_nets > 1 else ()
        kernel_init, bias_init = _initializers(self.init_rule, fan_in)
        kernel = self._param(f"kernel_{i}", kernel_init, (*nets, fan_in, size))
        into = "...gi" if nets and split else "...i"
        rule = f"{into},gio->...go" if nets else "...i,io->...o"
        out = jnp.einsum(rule, x.astype(compute), kernel.astype(compute))
        if self.use_bias:
            bias = self._param(f"bias_{i}", bias_init, (*nets, size))
            out = out + bias.astype(compute)
        return out

    def _param(
        self, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...]
    ) -> Array:
        value = self.param(name, init, shape, self.dtypes.params)
        return value if self.learned else jax.lax.stop_gradient(value)

    def _heads_of(self, x: Array) -> Array:
        width, shuffled = x.shape[-1], self.kind == "shuffled"
        if width != self.key_width:
            raise ShapeError("x", x.shape, f"a width of {self.key_width}, the key's")
        if shuffled and self.n_heads > 1 and width % 2**self.n_heads:
            raise ShapeError("x", x.shape, f"a width divisible by {2**self.n_heads}")
        heads = [x] * self.n_heads
        if shuffled:
            heads = [x] + [_shuffled(x, 2 ** (a + 1)) for a in range(1, self.n_heads)]
        return jnp.stack(heads, axis=-2)


def _shuffled(x: Array, n_blocks: int) -> Array:
    """`x` cut into blocks along its last axis: the even ones, then the odd ones."""
    blocks = x.reshape(*x.shape[:-1], n_blocks // 2, 2, x.shape[-1] // n_blocks)
    return jnp.swapaxes(blocks, -3, -2).reshape(x.shape)


def _initializers(
    name: str, fan_in: int
) -> tuple[nn.initializers.Initializer, nn.initializers.Initializer]:
    """Of a kernel [in, out], or [G, in, out] drawn net by net, and of its bias."""
    rules: dict[str, tuple[float, Any, Any]] = {
        # U(-a, a) has the variance a^2 / 3.
        "uniform": (1 / 3, "fan_in", "uniform"),
        "xavier_uniform": (1.0, "fan_avg", "uniform"),
        "truncated_normal": (1.0, "fan_in", "truncated_normal"),
    }
    scale, mode, distribution = rules[name]

    def kernel(key: Any, shape: Any, dtype: Any = jnp.float32) -> Array:
        nets = tuple(range(len(shape) - 2))
        return nn.initializers.variance_scaling(
            scale, mode, distribution, batch_axis=nets
        )(key, shape, dtype)

    def bias(key: Any, shape: Any, dtype: Any = jnp.float32) -> Array:
        bound = fan_in**-0.5 if name == "uniform" else 0.0
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return kernel, bias
