"""Build a frozen dataclass from a mapping. OmegaConf checks types; the fields' metadata has ranges and choices."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedloom.conf.errors import UserError, listed, nearest, plain
from fedloom.conf.package import NAME
from fedloom.conf.plugins import error_summary
from fedloom.conf.shorthand import expand_shorthand, fields_of

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    named: bool = False,
    entries: type | None = None,
    path: bool = False,
) -> Any:
    """Declare a dataclass field with its default, meaning and range.

    Args:
        low: The smallest value; of a list, of each entry.
        high: The largest value, in the same way.
        named: The field is a section with a name, and the name alone may replace it.
        entries: The dataclass of the entries, if the field may be a list.
        path: The field is a path or a list of paths; `~` is the home folder of the user who reads it.
    """
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "named": named, "path": path}
    metadata |= {"entries": entries} if entries else {}
    if isinstance(default, list | dict) or callable(default):
        factory = default if callable(default) else lambda: type(default)(default)
        hashed = None if callable(default) else False  # lists and dictionaries have no hash
        return dataclasses.field(default_factory=factory, hash=hashed, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


MISSPELT = 0.72  # keys that are this similar are misspellings, and short ones with one wrong letter


class UnknownKeyError(UserError):
    """The error for a key that its section lacks. It suggests `near`, by default the most similar known key."""

    def __init__(self, key: str, known: Sequence[str], near: str = "") -> None:
        self.key, self.known = key, known
        by_end = {each.rpartition(".")[2]: each for each in known}
        end = key.rpartition(".")[2]
        cutoff = max(0.5, min(MISSPELT, 1 - 1 / max(len(end), 1) - 1e-9))
        self.near = near or by_end.get(nearest(end, by_end, cutoff), "")
        hint = f"; did you mean '{self.near}'?" if self.near else ""
        super().__init__(f"unknown key '{key}'{hint} (known: {listed(key, known)})")

    def suggesting(self, near: str) -> "UnknownKeyError":
        """Return a copy of the error that suggests the key `near`."""
        return UnknownKeyError(self.key, self.known, near)


def build(schema: type[T], given: Mapping[str, Any], where: str = "") -> T:
    """Build an instance of the dataclass `schema` from a mapping.

    `where` is the mapping's dotted key. The mapping may come from another machine, so nothing in it is interpolated.
    Raises UserError with the full key, its value, and the accepted values.
    """
    given = expand_shorthand(schema, given)
    _check_keys(schema, given, where)
    _check_literal(given, where)
    _check_texts(schema, given, where)
    result = _instance(schema, given, where)
    _check_values(result, where)
    return result


def _instance(schema: type[T], given: Mapping[str, Any], where: str) -> T:
    """Return an instance of `schema`. OmegaConf converts the values and checks their types."""
    fields = fields_of(schema)
    for key, field in fields.items():
        if key not in given and field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{join(where, key)}: is missing; it takes {takes(field)}")
    nested = [key for key in given if _nested(fields[key])]
    values = {key: _instance(fields[key].type, given[key], join(where, key)) for key in nested}  # type: ignore[arg-type]
    try:
        if not schema.__module__.startswith(f"{NAME}."):
            OmegaConf.structured(schema)  # raises an error for a field whose type is not supported
        plain = {key: item for key, item in given.items() if key not in values}
        return schema(**values, **_converted(schema, plain))
    except (OmegaConfBaseException, TypeError) as error:
        raise _misfit(schema, given, where) or UserError(_in_one_line(error, where)) from None
    except UserError:
        raise
    except Exception as error:  # from the class's own checks
        raise UserError(f"{where}: {error_summary(error)}") from error


def _converted(schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of fields of `schema`, converted to the fields' types."""
    if not given:
        return {}
    return vars(OmegaConf.to_object(OmegaConf.merge(_typed(schema, tuple(given)), OmegaConf.create(dict(given)))))


def at_home(instance: T) -> T:
    """Return a dataclass instance with `~` and `~name` at the start of its path fields replaced by the home folder."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        if field.metadata.get("path"):
            changed[field.name] = [*map(os.path.expanduser, value)] if isinstance(value, list) else os.path.expanduser(value)
        elif dataclasses.is_dataclass(value):
            changed[field.name] = at_home(value)
    return dataclasses.replace(instance, **changed)  # type: ignore[type-var]


def checked(given: Any, where: str) -> Any:
    """Return a value unchanged. Raise UserError if it contains a text that OmegaConf would interpolate (${...}, ???)."""
    _check_literal(given, where)
    return given


def build_many(schema: type[T], given: Mapping[str, Any], where: str) -> T:
    """Build an instance as `build` does, but faster for thousands of sections that differ only in plain values."""
    given = expand_shorthand(schema, given)
    _check_keys(schema, given, where)
    _check_literal(given, where)
    kinds = _plain_kinds(schema)
    plain = {key: item for key, item in given.items() if type(item) is kinds.get(key)}
    rest = json.dumps({key: item for key, item in given.items() if key not in plain}, sort_keys=True, default=repr)
    if (schema, rest) not in _BUILT:
        if len(_BUILT) >= MOST_BUILT:
            _BUILT.clear()
        _BUILT[schema, rest] = build(schema, {key: item for key, item in given.items() if key not in plain}, where)
    fields = fields_of(schema)
    for key, item in plain.items():  # the rest was checked when it was built
        _check_value(fields[key], item, join(where, key))
    return dataclasses.replace(_BUILT[schema, rest], **plain)


MOST_BUILT = 1000
_BUILT: dict[tuple[type, str], Any] = {}


@functools.cache
def _plain_kinds(schema: type) -> dict[str, type]:
    """Return the fields that are texts, numbers or truth values, with their types."""
    return {field.name: field.type for field in dataclasses.fields(schema) if field.type in (str, int, float, bool)}  # type: ignore[arg-type,misc]


@functools.cache
def _typed(schema: type, names: tuple[str, ...]) -> Any:
    """Return OmegaConf's form of the named fields of `schema` alone: it copies all that it has at each merge."""
    kinds = get_type_hints(schema)
    return OmegaConf.structured(dataclasses.make_dataclass(schema.__name__, [(name, kinds[name]) for name in names]))


def _check_texts(schema: type, given: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a number or truth value in place of a text: its written form is unknown."""
    for name, item in given.items():
        field = fields_of(schema)[name]
        texts = field.type is str or (get_origin(field.type) is list and get_args(field.type)[0] is str)
        for value in (item if isinstance(item, list | tuple) else [item]) if texts else []:
            if isinstance(value, bool | int | float):
                key = join(where, name)
                raise UserError(f"{key}: got {_short(value)}, takes {takes(field, item)}; put it in quotes if it is a text")


def join(where: str, key: str) -> str:
    """Return the dotted key of `key` in the section `where`."""
    return f"{where}.{key}" if where else key


def _nested(field: dataclasses.Field[Any]) -> bool:
    return isinstance(field.type, type) and dataclasses.is_dataclass(field.type)


def _check_keys(schema: type, given: Mapping[str, Any], where: str) -> None:
    fields = fields_of(schema)
    for key, item in given.items():
        if key not in fields:
            raise UnknownKeyError(join(where, str(key)), [join(where, name) for name in fields])
        for section, content, position in _sections(fields[key], item, join(where, key)):
            if not isinstance(content, Mapping):
                raise UserError(f"{position}: got {_short(content)}, takes a section of keys")
            _check_keys(section, content, position)


def _sections(field: dataclasses.Field[Any], item: Any, key: str) -> list[tuple[type, Any, str]]:
    """Return (class, value, key) for a field that is a dataclass, or for each entry of its list of dataclasses."""
    if _nested(field):
        return [(field.type, item, key)]  # type: ignore[list-item]
    (entry,) = get_args(field.type) if get_origin(field.type) is list else (None,)
    if not (dataclasses.is_dataclass(entry) and isinstance(item, list)):
        return []
    return [(entry, content, f"{key}[{index}]") for index, content in enumerate(item)]  # type: ignore[misc]


def _check_literal(item: Any, where: str) -> None:
    """Raise UserError for a text that OmegaConf would interpolate, for example from the environment."""
    if isinstance(item, Mapping):
        for key, option in item.items():
            _check_literal(key, where)
            _check_literal(option, join(where, str(key)))
    elif isinstance(item, list | tuple):
        for index, option in enumerate(item):
            _check_literal(option, f"{where}[{index}]")
    elif isinstance(item, str) and ("${" in item or item == "???"):
        raise UserError(
            f"{where}: contains '{'${' if '${' in item else item}', which is not interpolated here; write the value itself"
        )


def _misfit(schema: type, given: Mapping[str, Any], where: str) -> UserError | None:
    """Return the error for the first key with a value of the wrong type."""
    for field in dataclasses.fields(schema):
        if field.name not in given or _fits(schema, field.name, item := given[field.name]):
            continue
        key = join(where, field.name)
        for section, content, position in _sections(field, item, key):
            if error := _misfit(section, content, position):
                return error
        about = f" ({field.metadata['help']})" if field.metadata.get("help") else ""
        return UserError(f"{key}: got {_short(item)}, takes {takes(field, item)}{about}")
    return None


def _fits(schema: type, name: str, item: Any) -> bool:
    try:
        _converted(schema, {name: item})
    except (OmegaConfBaseException, TypeError):
        return False
    return True


def takes(field: dataclasses.Field[Any], item: Any = None) -> str:
    """Return a text that says which values a field takes: "a number from 0 to 1". `item`: a wrong value, for a hint."""
    kind, choices = get_origin(field.type) or field.type, field.metadata.get("choices")
    if choices:
        return f"{'a list of' if kind is list else 'one of'}: {_row(choices)}"
    if kind is UnionType:  # of a type and None
        kind = get_args(field.type)[0]
    if kind is list:
        entry = next(iter(get_args(field.type)), Any)
        return f"a list of {ENTRIES.get(get_origin(entry) or entry, 'sections')}"
    if kind in KINDS:
        return _bounded(KINDS[kind], field.metadata.get("low"), field.metadata.get("high"))
    return "a section of keys" + (" that are texts; put them in quotes" if isinstance(item, Mapping) else "")


KINDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
ENTRIES: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts", bool: "truth values", Any: "values"}
MOST_CHARACTERS = 100  # characters of a value in an error
MAX_FLOAT32 = 3.4e38  # of float32


def _short(item: Any) -> str:
    text = repr(item)
    return plain(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...")


def _in_one_line(error: Exception, where: str) -> str:
    first = str(error).splitlines()[0]
    full = getattr(error, "full_key", None)
    key = join(where, str(full)) if full else where
    return f"{key}: {first}" if key else first


def _check_values(instance: Any, where: str) -> None:
    for field in dataclasses.fields(instance):
        _check_value(field, getattr(instance, field.name), join(where, field.name))


def _check_value(field: dataclasses.Field[Any], value: Any, key: str) -> None:
    if dataclasses.is_dataclass(value):
        _check_values(value, key)
        return
    low, high = field.metadata.get("low"), field.metadata.get("high")
    choices = field.metadata.get("choices")
    for choice in value if choices and isinstance(value, list) else [value] if choices else []:
        if choice not in choices:
            raise UserError(f"{key}: got '{choice}', takes {takes(field)}")
    if get_origin(field.type) is list and get_args(field.type)[0] in (str, int, float):
        _check_entries(key, value)
    if isinstance(value, str):
        _check_text(key, value)
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float) and not isinstance(number, bool):
            _check_range(key, number, low, high)


def _check_entries(key: str, entries: list[Any]) -> None:
    """Raise UserError for a list or section among texts or numbers, which OmegaConf does not check."""
    for index, entry in enumerate(entries):
        if isinstance(entry, list | dict):
            raise UserError(f"{key}[{index}]: got {_short(entry)}, takes a text or a number")


def _check_range(key: str, number: float, low: float | None, high: float | None) -> None:
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        raise UserError(f"{key}: got {number}, takes {_bounded('a number', low, high)}")
    if isinstance(number, float) and abs(number) > MAX_FLOAT32:
        raise UserError(f"{key}: got {number}, takes {_bounded('a number', low, MAX_FLOAT32)} (32 bits)")


def _check_text(key: str, text: str) -> None:
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise UserError(f"{key}: got {_short(text)}, takes a text in one line, without control characters")


def _row(choices: Sequence[str]) -> str:
    """Return the choices with commas between, an empty one as ""."""
    return ", ".join(choice or '""' for choice in choices)


def _bounded(kind: str, low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "a finite number" if kind == "a number" else kind
    if high is None:
        return f"{kind} of at least {low}"
    return f"{kind} of at most {high}" if low is None else f"{kind} from {low} to {high}"
