"""Values of config fields: text and plain data, checked against the field's type.

What: `coerce` (plain data, as in JSON and sweeps) and `parse` (text of an override).
Why: the command line, sweeps and saved configs share one strict rule for every value.
When not: what a legal value means is each config's own `__post_init__`.
"""

import ast
import dataclasses
import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from memjax.errors import ConfigError

_INT = re.compile(r"[+-]?\d+(_\d+)*")
_BOOLS = {"true": True, "false": False}
_NONES = ("none", "null")


def is_config(hint: Any) -> bool:
    """True when `hint` is a dataclass type."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def hints_of(cls: type) -> dict[str, Any]:
    """Field name -> type of a config class, in declaration order."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; the hint alone when it is none."""
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (hint,)


def kind_of(cls: type) -> str:
    """The tag that names a config class in JSON: EngramConfig -> "engram"."""
    name = cls.__name__.removesuffix("Config")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def unknown(
    field: str, value: Any, near: str, candidates: Iterable[str]
) -> ConfigError:
    """The error for a name that does not exist, with the nearest one that does."""
    candidates = list(candidates)
    close = difflib.get_close_matches(near, candidates, n=1, cutoff=0.5)
    parent = field.rpartition(".")[0]
    if close:
        best = f"{parent}.{close[0]}" if parent else close[0]
        return ConfigError(field, value, f"no such field; did you mean {best}?")
    return ConfigError(field, value, f"no such field; there is {', '.join(candidates)}")


def explain(hint: Any) -> str:
    """What a hint allows, in words, for an error line."""
    if hint in (None, type(None)):
        return "none"
    if len(members(hint)) > 1:
        return " or ".join(explain(member) for member in members(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        elements = get_args(hint)
        if len(elements) == 2 and elements[1] is Ellipsis:
            return f"a list with each {explain(elements[0])}"
        return f"a list of exactly {len(elements)}: " + ", ".join(
            explain(element) for element in elements
        )
    if is_config(hint):
        kind = kind_of(hint)
        return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} config"
    names = {int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(hint, "a text" if hint is str else str(hint))


def _elements(hint: Any, count: int, field: str, value: Any) -> Sequence[Any]:
    """The type of each of `count` elements of a tuple field."""
    arguments = get_args(hint)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return [arguments[0]] * count
    if len(arguments) != count:
        raise ConfigError(field, value, explain(hint))
    return arguments


def coerce(value: Any, hint: Any, field: str) -> Any:
    """`value` as the type `hint`, or ConfigError naming `field` and what is allowed.

    Nothing is rounded or guessed: 16.5 and true are no whole numbers, 0 is no
    true-or-false, and only a whole number widens to a float. Lists (JSON) become
    tuples, and a mapping becomes the config its `kind` names.
    """
    if hint is Any:
        return value
    alternatives = members(hint)
    if len(alternatives) > 1:
        return _coerce_union(value, alternatives, hint, field)
    if hint in (None, type(None)):
        good = value is None
    elif hint is bool or hint is str:
        good = isinstance(value, hint)
    elif hint is int:
        good = isinstance(value, int) and not isinstance(value, bool)
    elif hint is float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if good else value
    elif get_origin(hint) is Literal:
        good = any(
            type(value) is type(choice) and value == choice for choice in get_args(hint)
        )
    elif get_origin(hint) is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(field, value, explain(hint))
        kinds = _elements(hint, len(value), field, value)
        return tuple(
            coerce(part, kind, f"{field}.{index}")
            for index, (part, kind) in enumerate(zip(value, kinds, strict=True))
        )
    elif is_config(hint):
        if isinstance(value, Mapping):
            return construct(hint, value, field)
        good = isinstance(value, hint)
    else:
        raise TypeError(f"{field} has a type that configs do not carry: {hint}")
    if not good:
        raise ConfigError(field, value, explain(hint))
    return value


def _coerce_union(
    value: Any, alternatives: tuple[Any, ...], hint: Any, field: str
) -> Any:
    configs = {kind_of(member): member for member in alternatives if is_config(member)}
    if isinstance(value, Mapping) and configs:
        kind = value.get("kind", next(iter(configs)) if len(configs) == 1 else None)
        if kind not in configs:
            raise ConfigError(f"{field}.kind", kind, f"one of {', '.join(configs)}")
        return construct(configs[kind], value, field)
    for member in alternatives:  # an exact type first: 1 stays an int in int | float
        if type(value) is member:
            return value
    for member in alternatives:
        try:
            return coerce(value, member, field)
        except ConfigError:
            continue
    raise ConfigError(field, value, explain(hint))


def parse(text: str, hint: Any, field: str) -> Any:
    """The value that `text` (of a command line) means for a field of type `hint`.

    Lists are written 3,4,5 or (3,4,5), the empty list (). `none` is none where the
    field may be none. An empty text is an error, also for a text field.
    """
    stripped = text.strip()
    if not stripped:
        raise ConfigError(field, text, explain(hint))
    alternatives = members(hint)
    if len(alternatives) > 1:
        for member in sorted(alternatives, key=lambda member: member is str):
            try:
                return parse(text, member, field)
            except ConfigError:
                continue
        raise ConfigError(field, text, explain(hint))
    if hint in (None, type(None)) and stripped.lower() in _NONES:
        return None
    if hint is str:
        return text
    if hint is bool and stripped.lower() in _BOOLS:
        return _BOOLS[stripped.lower()]
    if hint is int and _INT.fullmatch(stripped):
        return int(stripped)
    if hint is float:
        try:
            return float(stripped)
        except ValueError:
            pass
    if get_origin(hint) is Literal:
        for choice in get_args(hint):
            if str(choice) == stripped:
                return choice
    if get_origin(hint) is tuple:
        return _parse_tuple(stripped, hint, field)
    raise ConfigError(field, text, explain(hint))


def _parse_tuple(text: str, hint: Any, field: str) -> Any:
    if "(" in text[1:] or "[" in text[1:]:  # nested: python's own notation
        try:
            return coerce(ast.literal_eval(text), hint, field)
        except (ValueError, SyntaxError):
            raise ConfigError(field, text, explain(hint)) from None
    if text[0] in "([" and text[-1] in ")]":
        text = text[1:-1]
    parts = [part for part in re.split(r"[,\s]+", text.strip().rstrip(",")) if part]
    kinds = _elements(hint, len(parts), field, text)
    return tuple(
        parse(part, kind, f"{field}.{index}")
        for index, (part, kind) in enumerate(zip(parts, kinds, strict=True))
    )


def construct(cls: type, mapping: Mapping[str, Any], prefix: str) -> Any:
    """A config of class `cls` from plain data; fields left out keep their default."""
    hints = hints_of(cls)
    kind = mapping.get("kind", kind_of(cls)) if "kind" not in hints else kind_of(cls)
    if kind != kind_of(cls):
        raise ConfigError(join(prefix, "kind"), kind, kind_of(cls))
    values = {}
    for name, value in mapping.items():
        field = join(prefix, name)
        if name == "kind" and "kind" not in hints:
            continue
        if name not in hints:
            raise unknown(field, value, name, hints)
        values[name] = coerce(value, hints[name], field)
    for field in dataclasses.fields(cls):
        if field.name not in values and (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            raise ConfigError(join(prefix, field.name), None, "a value; it is missing")
    return build(lambda: cls(**values), cls, prefix)


def build(make: Any, cls: type, prefix: str) -> Any:
    """`make()`, with the field of a ConfigError lengthened to its whole path."""
    try:
        return make()
    except ConfigError as error:
        if not prefix or error.field == prefix or error.field.startswith(f"{prefix}."):
            raise
        inner = error.field.split(".")
        while len(inner) > 1 and inner[0] not in hints_of(cls):
            inner = inner[1:]
        field = join(prefix, ".".join(inner))
        raise ConfigError(field, error.value, error.allowed) from None


def join(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` at the root."""
    return f"{prefix}.{name}" if prefix else name
