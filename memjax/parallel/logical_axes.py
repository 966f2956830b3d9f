"""Logical axes of arrays, and the rules that map them to axes of the mesh.

What: `LogicalRules`, names -> PartitionSpec; `ActivationSharding`, the same as a
    constraint inside the model; `shardings_like`, for states shaped like parameters.
Why: layers say what an axis is (heads, mlp), the experiment says where it is split.
When not: value tables in mode "rows"; they are divided by `row_sharding`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memjax.errors import ConfigError

Rules: TypeAlias = tuple[tuple[str, str | None], ...]
Names: TypeAlias = tuple[str | None, ...]

AXES = ("data", "fsdp", "tensor", "table")
BATCH_AXES = ("data", "fsdp", "table")  # over which the rows of a batch are split
RULE_AXES = ("fsdp", "tensor")
DEFAULT_RULES: Rules = (
    ("layers", None),  # of scanned blocks
    ("vocab", "tensor"),
    ("embed", "fsdp"),  # the width of the stream
    ("heads", "tensor"),  # of queries, flat: heads x width
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("experts", None),
    ("expert_mlp", "tensor"),
    ("kernel_in", "fsdp"),  # of every other matrix, those of memories among them
    ("kernel_out", None),
    ("sub_keys", "fsdp"),
    ("table_rows", "fsdp"),  # of tables that are ordinary parameters
    ("table_width", None),
)
_NAMES = tuple(name for name, _ in DEFAULT_RULES)


def batch_axes(sizes: Mapping[str, int], n_rows: int) -> tuple[str, ...]:
    """The mesh axes over which n_rows rows of a batch are split, for `mesh.shape`.

    BATCH_AXES; data and fsdp alone where the rows do not divide over "table" as well
    (the devices that hold a table together then all compute all of their rows); and
    () where they do not divide over these either.
    """
    for axes in (BATCH_AXES, BATCH_AXES[:-1]):
        if n_rows % math.prod(sizes[axis] for axis in axes) == 0:
            return axes
    return ()


def check_rules(rules: Any) -> None:
    """ConfigError unless these are pairs of a logical axis and a mesh axis or None."""
    if not isinstance(rules, tuple):
        raise ConfigError("mesh.rules", rules, "a tuple of pairs")
    seen = set()
    for i, rule in enumerate(rules):
        field = f"mesh.rules.{i}"
        if not isinstance(rule, tuple) or len(rule) != 2:
            raise ConfigError(field, rule, "a pair (logical axis, mesh axis or None)")
        name, axis = rule
        if name not in _NAMES:
            raise ConfigError(field, name, f"one of {_NAMES}")
        if axis is not None and axis not in RULE_AXES:
            raise ConfigError(field, axis, f"None or one of {RULE_AXES}")
        if name in seen:
            raise ConfigError(field, name, "one rule for each logical axis")
        seen.add(name)


@dataclass(frozen=True)
class LogicalRules:
    """Which mesh axis each logical axis is split over.

    Attributes:
        sizes: (mesh axis, its size), of all axes of the mesh.
        rules: the user's; they come before DEFAULT_RULES.
    """

    sizes: tuple[tuple[str, int], ...]
    rules: Rules = ()

    def axis_of(self, name: str | None) -> str | None:
        """The mesh axis of a logical axis, whatever its size; None: not split."""
        if name is None:
            return None
        return dict((*DEFAULT_RULES, *self.rules))[name]

    def parts_of(self, name: str | None) -> int:
        """Into how many parts a logical axis is split."""
        axis = self.axis_of(name)
        return 1 if axis is None else dict(self.sizes)[axis]

    def spec(self, path: str, names: Names, shape: tuple[int, ...]) -> PartitionSpec:
        """How an array is divided; an axis that does not divide stays whole.

        Args:
            path: of the array, for messages.
            names: a logical axis, or None, for each axis of the array.
            shape: of the array.

        Raises:
            ConfigError: two of its logical axes are mapped to one mesh axis, whatever
                the size of that.
        """
        taken: dict[str, str] = {}
        entries: list[str | None] = []
        for name, size in zip(names, shape, strict=True):
            axis = self.axis_of(name)
            if name is not None and axis is not None:
                if axis in taken:
                    raise ConfigError(
                        "mesh.rules",
                        ((taken[axis], axis), (name, axis)),
                        f"different mesh axes for {taken[axis]!r} and {name!r}, which "
                        f"are both axes of {path}",
                    )
                taken[axis] = name
            split = self.parts_of(name) > 1 and size % self.parts_of(name) == 0
            entries.append(axis if split else None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def check_sizes(self, wanted: Mapping[str, tuple[str, int]]) -> None:
        """ConfigError for a size that its mesh axis does not divide.

        Args:
            wanted: {logical axis: (field of the experiment, its value)}.
        """
        for name, (field, value) in wanted.items():
            parts = self.parts_of(name)
            if value % parts:
                raise ConfigError(
                    field,
                    value,
                    f"a multiple of mesh.{self.axis_of(name)} = {parts}, or mesh.rules "
                    f"with ({name!r}, None)",
                )


@dataclass(frozen=True)
class ActivationSharding:
    """Constraints on activations; the compiler decides about all that is not named.

    Attributes:
        mesh: the mesh.
        rules: of its logical axes; "batch", which is none, is split over BATCH_AXES.
    """

    mesh: Mesh
    rules: LogicalRules

    def __call__(self, x: jax.Array, names: Names) -> jax.Array:
        """`x` divided as its first axes say: "batch", a logical axis or None.

        An axis that does not divide (a batch of one, while sampling) stays whole, and
        so do axes without a name, and those that a rule gives to an axis of the batch.
        """
        batched = names[0] == "batch"
        rest = (None if batched else names[0], *names[1:])
        rest = (*rest, *(None,) * (x.ndim - len(names)))
        spec = self.rules.spec("an activation", rest, x.shape)
        entries: list[Any] = [*spec, *(None,) * (x.ndim - len(spec))]
        if batched:
            axes = batch_axes(self.mesh.shape, x.shape[0])
            entries = [None if entry in axes else entry for entry in entries]
            entries[0] = axes or None
        sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return jax.lax.with_sharding_constraint(x, sharding)


def constrain(
    sharding: ActivationSharding | None, x: jax.Array, *names: str | None
) -> jax.Array:
    """`sharding(x, names)`; without a sharding, x."""
    return x if sharding is None else sharding(x, names)


def shardings_like(
    tree: Any, mesh: Mesh, known: Mapping[str, tuple[tuple[int, ...], PartitionSpec]]
) -> Any:
    """A tree of shardings: each leaf as the known array that its path ends with.

    Args:
        tree: arrays or their shapes: parameters, an average, an optimizer's state.
        mesh: the mesh.
        known: {path: (shape, how it is divided)} of the parameters.

    Returns:
        A tree like it. A leaf whose path ends with no known path, or that has another
        shape, is whole on every device: counts, and states by row or column.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        for start in range(len(names)):
            found = known.get("/".join(names[start:]))
            if found is not None:
                shape, spec = found
                same = tuple(leaf.shape) == tuple(shape)
                return NamedSharding(mesh, spec if same else PartitionSpec())
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, tree)
