"""What values a field takes: checks of ranges and choices, and the words for errors."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, get_args, get_origin

from fedloom.conf.errors import UserError, plain
from fedloom.conf.shorthand import fields_of

KINDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
ENTRIES: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts", bool: "truth values", Any: "values"}
MOST_CHARACTERS = 100  # characters of a value in an error
MAX_FLOAT32 = 3.4e38  # of float32
TINY = 1e-6  # a lower limit up to this reads "above 0"


def join(where: str, key: str) -> str:
    """Return the dotted key of `key` in the section `where`."""
    return f"{where}.{key}" if where else key


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, a new one for each call; None if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def over_default(field: dataclasses.Field[Any], item: Any) -> Any:
    """Return a section merged over the field's default, so that keys that it lacks have the default's values."""
    return _merged(_as_section(default_of(field)), item) if isinstance(item, Mapping) else item


def _merged(under: Any, over: Any) -> Any:
    """Return `over`, at any depth of sections with those keys of `under` that it lacks."""
    if not (isinstance(under, Mapping) and isinstance(over, Mapping)):
        return over
    return {**under, **{key: _merged(under.get(key), item) for key, item in over.items()}}


def _as_section(value: Any) -> Any:
    """Return a dataclass instance as the section that builds it, and any other value unchanged."""
    if not dataclasses.is_dataclass(value):
        return value
    return {field.name: _as_section(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}


def takes(field: dataclasses.Field[Any], item: Any = None) -> str:
    """Return a text that says which values a field takes: "a number from 0 to 1". `item`: a wrong value, for a hint."""
    kind, choices = get_origin(field.type) or field.type, field.metadata.get("choices")
    if "takes" in field.metadata:
        return str(field.metadata["takes"])
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


def shortened(item: Any) -> str:
    """Return a value as a text for an error, in one line of at most MOST_CHARACTERS."""
    text = repr(item)
    return plain(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...")


def words_in(overrides: Any) -> list[str]:
    """Return overrides, a text or a list of texts, as a list. Raise UserError for other values."""
    words = list(overrides) if isinstance(overrides, list | tuple) else [overrides]
    if odd := [word for word in words if not isinstance(word, str)]:
        raise UserError(f"overrides: got {shortened(odd[0])}, takes words such as 'rounds=2', 'seed=1'")
    return words


def check_values(instance: Any, where: str) -> None:
    """Raise UserError for a field of a dataclass instance with a value out of range. `where`: its dotted key."""
    for field in fields_of(type(instance)).values():
        check_value(field, getattr(instance, field.name), join(where, field.name))


def check_value(field: dataclasses.Field[Any], value: Any, key: str) -> None:
    """Raise UserError for a value that is out of its field's range, or none of its choices. `key`: its dotted key."""
    if dataclasses.is_dataclass(value):
        check_values(value, key)
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
            raise UserError(f"{key}[{index}]: got {shortened(entry)}, takes a text or a number")


def _check_range(key: str, number: float, low: float | None, high: float | None) -> None:
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        raise UserError(f"{key}: got {number}, takes {_bounded('a number', low, high)}")
    if isinstance(number, float) and abs(number) > MAX_FLOAT32:
        raise UserError(f"{key}: got {number}, takes {_bounded('a number', low, MAX_FLOAT32)} (32 bits)")


def _check_text(key: str, text: str) -> None:
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        raise UserError(f"{key}: got {shortened(text)}, takes a text in one line, without control characters")


def _row(choices: Sequence[str]) -> str:
    """Return the choices with commas between, an empty one as ""."""
    return ", ".join(choice or '""' for choice in choices)


def _bounded(kind: str, low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "a finite number" if kind == "a number" else kind
    if low is not None and 0 < low <= TINY:
        return f"{kind} above 0" if high is None else f"{kind} above 0, of at most {high}"
    if high is None:
        return f"{kind} of at least {low}"
    return f"{kind} of at most {high}" if low is None else f"{kind} from {low} to {high}"
