"""A function of batches that each device computes for its own rows.

What: `over_batch`, `jax.shard_map` over the axes of a batch, with whole arguments.
Why: the compiler divides most of a model by itself, but no top-k: it would gather the
    scores of the whole batch on every device.
When not: functions in which a row of the batch depends on another.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from memjax.parallel.logical_axes import batch_axes


def over_batch(
    mesh: Mesh | None,
    function: Callable[..., Any],
    split: Sequence[jax.Array],
    whole: Sequence[jax.Array] = (),
) -> Any:
    """function(*split, *whole), by parts of the first axis of `split`.

    Args:
        mesh: None, or one that does not divide the rows: the function as it is.
        function: returns arrays whose first axis is that of the batch.
        split: arrays that begin with the rows of the batch.
        whole: arrays that every device gets whole; their gradients are added up.
    """
    axes = () if mesh is None else batch_axes(mesh.shape, len(split[0]))
    if mesh is None or math.prod(mesh.shape[axis] for axis in axes) == 1:
        return function(*split, *whole)
    rows = PartitionSpec(axes)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*(rows,) * len(split), *(PartitionSpec(),) * len(whole)),
        out_specs=rows,
        check_vma=False,
    )(*split, *whole)
