"""Dotted paths into a tree of configs: set, list, compare, write as plain data.

What: `override`, `set_path`, `flatten`, `diff`, `to_dict`, `from_dict`.
Why: `model.memories.0.n_heads` means the same on a command line, in a sweep, in a diff.
When not: inside the package, where a config's fields are read as attributes.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args, get_origin

from memjax.errors import ConfigError
from memjax.experiment import values


class Change(NamedTuple):
    """One field that differs between two configs."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


class _Leaf(NamedTuple):
    value: Any


def set_path(config: Any, path: str, value: Any) -> Any:
    """`config` with the field at `path` replaced; see `override`."""
    return override(config, [(path, value)])


def override(config: Any, changes: Iterable[tuple[str, Any]]) -> Any:
    """A copy of `config` with every (path, value) applied at once.

    Args:
      config: a frozen dataclass.
      changes: paths are field names and tuple indices joined by dots; dashes count as
        underscores. A text for a field of another type is parsed as on the command
        line. Of two values for one path the later wins; a whole list and fields
        inside it may both be given, and the list is replaced first.

    Returns:
      The new config. Each touched config is rebuilt once, so that its checks see the
      final values and never a state between two changes.

    Raises:
      ConfigError: no such field (names the nearest), wrong type, or a value that the
        config itself refuses.
    """
    tree: dict[str, Any] = {}
    for path, value in changes:
        node = tree
        parts = path.replace("-", "_").split(".")
        if not all(parts):
            raise ConfigError(path, value, "field names joined by single dots")
        if len(parts) == 1 and parts[0] not in values.hints_of(type(config)):
            raise _unknown_at_root(config, parts[0], value)
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        slot = node.setdefault(parts[-1], {})
        slot[""] = _Leaf(value)
    return _apply(config, type(config), tree, "")


def _unknown_at_root(config: Any, name: str, value: Any) -> ConfigError:
    """The error for `d_model` where `model.d_model` was meant, or a mistyped name."""
    nested = [path for path in flatten(config) if path.endswith(f".{name}")]
    if nested:
        return ConfigError(name, value, f"no such field; did you mean {nested[0]}?")
    return values.unknown(name, value, name, values.hints_of(type(config)))


def _apply(node: Any, hint: Any, tree: dict[str, Any], prefix: str) -> Any:
    tree = dict(tree)
    leaf = tree.pop("", None)
    if leaf is not None:
        text = isinstance(leaf.value, str)
        convert = values.parse if text else values.coerce
        node = convert(leaf.value, hint, prefix)
    if not tree:
        return node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return _apply_config(node, tree, prefix)
    if isinstance(node, tuple) and get_origin(_tuple_hint(hint)) is tuple:
        return _apply_tuple(node, _tuple_hint(hint), tree, prefix)
    name = next(iter(tree))
    field = values.join(prefix, name)
    raise ConfigError(field, _first(tree[name]), f"{prefix} is {node!r}")


def _apply_config(node: Any, tree: dict[str, Any], prefix: str) -> Any:
    hints = values.hints_of(type(node))
    new = {}
    for name, subtree in tree.items():
        field = values.join(prefix, name)
        if name not in hints:
            raise values.unknown(field, _first(subtree), name, hints)
        new[name] = _apply(getattr(node, name), hints[name], subtree, field)
    return values.build(lambda: dataclasses.replace(node, **new), type(node), prefix)


def _apply_tuple(
    node: tuple[Any, ...], hint: Any, tree: dict[str, Any], prefix: str
) -> tuple[Any, ...]:
    new = list(node)
    for name, subtree in tree.items():
        field = values.join(prefix, name)
        if not name.isdigit() or int(name) >= len(node):
            allowed = f"{prefix} has {len(node)} entries"
            if node:
                allowed += f", indices 0 to {len(node) - 1}"
            raise ConfigError(field, _first(subtree), allowed)
        new[int(name)] = _apply(
            node[int(name)], _element_hint(hint, int(name)), subtree, field
        )
    return tuple(new)


def _tuple_hint(hint: Any) -> Any:
    tuples = [part for part in values.members(hint) if get_origin(part) is tuple]
    return tuples[0] if tuples else hint


def _element_hint(hint: Any, index: int) -> Any:
    arguments = get_args(hint)
    return arguments[0] if arguments[-1] is Ellipsis else arguments[index]


def _first(tree: Any) -> Any:
    """The value a user gave somewhere under a path that does not exist."""
    while isinstance(tree, dict):
        tree = next(iter(tree.values()))
    return tree.value


def to_dict(config: Any) -> dict[str, Any]:
    """`config` as plain data that JSON can hold, every field checked for its type.

    Configs inside lists and unions carry a `kind`, so that `from_dict` finds their
    class again. Raises ConfigError for a field whose value has another type.
    """
    return _plain_config(config, "", tagged=False)


def _plain_config(config: Any, prefix: str, tagged: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {"kind": values.kind_of(type(config))} if tagged else {}
    for name, hint in values.hints_of(type(config)).items():
        plain[name] = _plain(getattr(config, name), hint, values.join(prefix, name))
    return plain


def _plain(value: Any, hint: Any, field: str) -> Any:
    value = values.coerce(value, hint, field)
    if dataclasses.is_dataclass(value):
        return _plain_config(value, field, tagged=not values.is_config(hint))
    if isinstance(value, tuple):
        inner = _tuple_hint(hint)
        return [
            _plain_config(part, f"{field}.{index}", tagged=True)
            if dataclasses.is_dataclass(part)
            else _plain(part, _element_hint(inner, index), f"{field}.{index}")
            for index, part in enumerate(value)
        ]
    return value


def from_dict(cls: type, mapping: Mapping[str, Any]) -> Any:
    """The config that `to_dict` wrote; ConfigError for unknown or ill-typed entries."""
    return values.construct(cls, mapping, "")


def flatten(config: Any) -> dict[str, Any]:
    """Dotted path -> plain value for every leaf, in declaration order."""
    leaves: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                walk(part, values.join(path, name))
        elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
            for index, part in enumerate(value):
                walk(part, values.join(path, str(index)))
        else:
            leaves[path] = tuple(value) if isinstance(value, list) else value

    walk(to_dict(config), "")
    return leaves


def diff(before: Any, after: Any) -> list[Change]:
    """The fields that differ, by path; a field that one of them lacks is None there."""
    old, new = flatten(before), flatten(after)
    paths = [*old, *(path for path in new if path not in old)]
    return [
        Change(path, old.get(path), new.get(path))
        for path in paths
        if old.get(path) != new.get(path)
    ]
