"""Accept a name in place of a section with a name: `strategy: fedavg` means `strategy: {name: fedavg}`.

An option may imply the name: `partition: {column: ward}` means `partition: {name: column, column: ward}`. Sections with a
name are dataclasses with a field `name`, and fields marked as `named` (conf.typed.option).
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from fedloom.conf.errors import UserError

NAMED = ("network", "partition", "of", "head", "objective", "strategy", "optimizer", "schedule", "loss")
INTERPOLATED = "${"  # a value that is not known yet


def expand_shorthand(schema: type, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the values for a dataclass with each name in place of a section replaced by {name: ...}, at any depth."""
    implied = {} if "name" in values else _implied(schema, values)
    return implied | {key: opened_at(schema, key, item) if isinstance(key, str) else item for key, item in values.items()}


def _implied(schema: type, values: Mapping[Any, Any]) -> dict[Any, Any]:
    names = [field.metadata["implies"] for key, field in fields_of(schema).items()
             if values.get(key) and "implies" in field.metadata]  # fmt: skip
    return {"name": names[0]} if names else {}


def opened_at(schema: type, key: str, item: Any) -> Any:
    """Return `item`, the value of one dotted key such as sites.0.partition, changed as by `expand_shorthand`."""
    first, _, rest = key.partition(".")
    if (field := fields_of(schema).get(first)) is None:
        return item
    many, inner = _many(field), inner_of(field)
    if many and rest:
        index, _, rest = rest.partition(".")
        many = not index.isdecimal()
    if rest:
        return opened_at(inner, rest, item) if inner else item
    if many:
        return [_one(field, inner, entry) for entry in item] if isinstance(item, list) else item
    return _one(field, inner, item)


@functools.cache
def fields_of(schema: type) -> dict[str, dataclasses.Field[Any]]:
    """Return a dataclass's fields by name, with their types as types: `from __future__ import annotations` makes them texts.

    Raises UserError for a text that does not name a type.
    """
    fields = {field.name: field for field in dataclasses.fields(schema)}
    if not any(isinstance(field.type, str) for field in fields.values()):
        return fields
    try:
        kinds = get_type_hints(schema)
    except Exception as error:  # the text is the user's code
        raise UserError(f"{schema.__name__}: an annotation is not a type ({error}); correct it") from None
    return {name: _of_type(field, kinds[name]) for name, field in fields.items()}


def _of_type(field: dataclasses.Field[Any], kind: Any) -> dataclasses.Field[Any]:
    copied = copy.copy(field)
    copied.type = kind
    return copied


def _one(field: dataclasses.Field[Any], inner: type | None, item: Any) -> Any:
    if isinstance(item, str) and item and INTERPOLATED not in item and is_named(field):
        return {"name": item}
    return expand_shorthand(inner, item) if inner and isinstance(item, Mapping) else item


@functools.cache
def is_named(field: dataclasses.Field[Any]) -> bool:
    """Return whether a name may replace the field's section, or a section in its list. A site has no such short form."""
    section = None if _many(field) else inner_of(field)
    return field.metadata.get("named", False) or hasattr(section, "name")


def is_listed(field: dataclasses.Field[Any]) -> bool:
    """Return whether errors and tables of options name the field."""
    return bool(field.metadata.get("listed", True))


@functools.cache
def _many(field: dataclasses.Field[Any]) -> bool:
    return get_origin(field.type) is list or "entries" in field.metadata


@functools.cache
def inner_of(field: dataclasses.Field[Any]) -> type | None:
    """Return the dataclass that is the type of the field, or of its list's entries; None for other types."""
    kind = field.metadata.get("entries") or next(iter(get_args(field.type)), field.type)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def named_section(key: str, item: Any) -> str:
    """Return the section that an override only names (`strategy=fedavg`, `strategy.name=fedavg`); empty for others."""
    above, _, last = key.rpartition(".")
    section = above if last == "name" else key if isinstance(item, Mapping) and [*item] == ["name"] else ""
    return section if section.rpartition(".")[2] in NAMED else ""


def forget_options(merged: Any, key: str, item: Any) -> list[str]:
    """Remove the options of a network, objective, strategy or partition that a preset or override replaces.

    Return the dotted keys of what it removed.
    """
    above, _, last = key.rpartition(".")
    section, options = (above, {"name": item}) if last == "name" else (key, item)
    if not isinstance(options, Mapping):
        return []
    current, name = OmegaConf.select(merged, section), options.get("name")
    known = current.get("name") if isinstance(current, Mapping) else None
    if section.rpartition(".")[2] in NAMED and known is not None and name not in (None, known):
        OmegaConf.update(merged, section, {}, merge=False, force_add=True)
        return [f"{section}.{option}" for option in current or {} if option != "name"]
    if last == "name":
        return []
    return [lost for inner, option in options.items() if isinstance(option, Mapping)
            for lost in forget_options(merged, f"{section}.{inner}", option)]  # fmt: skip


def is_set(changes: Sequence[tuple[str, Any]], name: str) -> bool:
    """Return whether one of the overrides sets the dotted key `name`, or a key in it."""
    inside = [value_at(item, name.removeprefix(f"{key}.")) for key, item in changes if name.startswith(f"{key}.")]
    return any(key == name or key.startswith(f"{name}.") for key, _ in changes) or any(item is not None for item in inside)


def value_at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key of dictionaries and lists; None without one."""
    for part in key.split("."):
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdecimal() and int(part) < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree
