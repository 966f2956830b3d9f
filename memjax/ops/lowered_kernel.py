"""A computation with a form of its own for NVIDIA GPUs, chosen when it is lowered.

What: `lowered_kernel`, one array from one of two functions of equal meaning.
Why: only then it is known which platform a program is for, and on how many devices;
    `lax.platform_dependent` traces both forms for every platform and knows the first
    alone.
When not: forms of other operations, for which `lax.platform_dependent` will do.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from memjax.errors import ConfigError

Form = Callable[..., jax.Array]

_kernel_p = Primitive("memjax_kernel")


def lowered_kernel(
    plain: Form,
    kernel: Form,
    static: tuple[int, ...],
    operands: Any,
    out: tuple[tuple[int, ...], Any],
    named: str | None = None,
) -> jax.Array:
    """plain(*static, *operands), or kernel(*static, *operands) on NVIDIA GPUs.

    XLA cannot divide a kernel: in a program for several devices it runs inside
    `shard_map` only, with check_vma=False, and elsewhere the plain form does.

    Args:
        plain, kernel: functions, the same objects at every call. The derivative of
            both is that of `plain`.
        static: numbers they are handed first.
        operands: trees of arrays.
        out: shape and dtype of the result of both.
        named: a name by which the user demanded the kernel; it then runs on any number
            of devices.

    Raises:
        ConfigError: a kernel was demanded inside a `shard_map` that checks how results
            vary, or, when it is lowered, of another platform.
    """
    flat, tree = jax.tree.flatten(operands)
    if any(map(_checked_by_shard_map, flat)):
        if named is not None:
            raise ConfigError("kernel", named, "'auto' or 'xla' where check_vma=True")
        return plain(*static, *operands)
    settings = {
        "plain": plain,
        "kernel": kernel,
        "static": static,
        "tree": tree,
        "out": (out[0], jnp.dtype(out[1])),
        "named": named,
    }
    return _kernel_p.bind(*flat, **settings)


def _whole(form: Form, static: tuple[int, ...], tree: Any) -> Form:
    return lambda *flat: form(*static, *jax.tree.unflatten(tree, flat))


def _checked_by_shard_map(operand: Any) -> bool:
    """Whether shard_map wants to know how results vary, which a kernel cannot say."""
    kind = getattr(jax.typeof(operand), "manual_axis_type", None)
    return bool(getattr(kind, "varying", ()))


def _abstract(*_: Any, out: Any, **__: Any) -> ShapedArray:
    return ShapedArray(*out)


def _derivative(
    flat: Any, tangents: Any, *, plain: Form, static: Any, tree: Any, **settings: Any
) -> tuple[jax.Array, Any]:
    moving = [i for i, dx in enumerate(tangents) if not isinstance(dx, ad.Zero)]

    def form(*moved: jax.Array) -> jax.Array:
        new = dict(zip(moving, moved, strict=True))
        every = [new.get(i, x) for i, x in enumerate(flat)]
        return _whole(plain, static, tree)(*every)

    given = tuple(flat[i] for i in moving), tuple(tangents[i] for i in moving)
    settings |= {"plain": plain, "static": static, "tree": tree}
    return _kernel_p.bind(*flat, **settings), jax.jvp(form, *given)[1]


def _batched(
    flat: Any, axes: Any, *, plain: Form, kernel: Form, named: Any, **settings: Any
) -> tuple[jax.Array, int]:
    """Under `vmap` the plain form runs, unless a kernel was demanded."""
    form = _whole(
        plain if named is None else kernel, settings["static"], settings["tree"]
    )
    return jax.vmap(form, in_axes=axes)(*flat), 0


def _lower(ctx: Any, *values: Any, plain: Form, named: Any, **settings: Any) -> Any:
    if named is not None:
        raise ConfigError("kernel", named, "'auto' or 'xla' but on NVIDIA GPUs")
    form = _whole(plain, settings["static"], settings["tree"])
    return mlir.lower_fun(form, multiple_results=False)(ctx, *values)


def _lower_for_cuda(
    ctx: Any, *values: Any, kernel: Form, named: Any, **settings: Any
) -> Any:
    if named is None and not _in_one_piece(ctx.module_context.axis_context):
        return _lower(ctx, *values, named=None, **settings)
    form = _whole(kernel, settings["static"], settings["tree"])
    with warnings.catch_warnings():
        # From jax 0.11 on. Removal is known; the other back end is at hand.
        warnings.filterwarnings(
            "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
        )
        return mlir.lower_fun(form, multiple_results=False)(ctx, *values)


def _in_one_piece(context: Any) -> bool:
    """Whether the arrays of a program are on one device, or it is that of a device."""
    if getattr(context, "num_devices", None) == 1:
        return True
    mesh = getattr(context, "mesh", None)
    return mesh is not None and set(mesh.axis_names) <= set(context.manual_axes)


_kernel_p.def_impl(functools.partial(xla.apply_primitive, _kernel_p))
_kernel_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_kernel_p] = _derivative
batching.primitive_batchers[_kernel_p] = _batched
mlir.register_lowering(_kernel_p, _lower)
mlir.register_lowering(_kernel_p, _lower_for_cuda, platform="cuda")
