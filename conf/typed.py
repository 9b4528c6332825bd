"""Build a frozen dataclass from a mapping: types by OmegaConf, ranges and choices by the fields' own metadata."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import UserError, unknown
from conf.plugins import told

T = TypeVar("T")


def value(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field that documents itself and says which values it takes (bounds included)."""
    metadata = {"help": help, "low": low, "high": high, "choices": choices}
    if isinstance(default, list | dict) or callable(default):
        factory = default if callable(default) else lambda: type(default)(default)
        hashed = None if callable(default) else False  # lists and dictionaries cannot be
        return dataclasses.field(default_factory=factory, hash=hashed, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(schema: type[T], given: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `schema` from `given`.

    `where` is the dotted key that `given` stands at. Raises UserError naming the full key, what it got and what it takes.
    Nothing is interpolated here: `given` may come from another machine. What is read from a user's own file is before.
    """
    _check_keys(schema, given, where)
    _check_literal(given, where)
    try:
        merged = OmegaConf.merge(_base(schema), OmegaConf.create(dict(given)))
        result = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, TypeError) as error:
        raise UserError(_in_one_line(error, where)) from None
    except UserError:
        raise
    except Exception as error:  # of the class's own checks
        raise UserError(f"{where}: {told(error)}") from error
    _check_values(result, where)
    return result  # type: ignore[return-value]  # OmegaConf.to_object rebuilds the dataclass it was given


def checked(given: Any, where: str) -> Any:
    """The same. UserError for a text in it that OmegaConf would look up elsewhere."""
    _check_literal(given, where)
    return given


def build_many(schema: type[T], given: Mapping[str, Any], where: str) -> T:
    """As `build`, for thousands of sections that differ in plain values: what has its field's very type goes in as it is."""
    _check_keys(schema, given, where)
    _check_literal(given, where)
    kinds = _plain_kinds(schema)
    plain = {key: item for key, item in given.items() if type(item) is kinds.get(key)}
    rest = json.dumps({key: item for key, item in given.items() if key not in plain}, sort_keys=True, default=repr)
    if (schema, rest) not in _BUILT:
        if len(_BUILT) >= MOST_BUILT:
            _BUILT.clear()
        _BUILT[schema, rest] = build(schema, {key: item for key, item in given.items() if key not in plain}, where)
    result = dataclasses.replace(_BUILT[schema, rest], **plain)
    _check_values(result, where)
    return result


MOST_BUILT = 1000
_BUILT: dict[tuple[type, str], Any] = {}


@functools.cache
def _plain_kinds(schema: type) -> dict[str, type]:
    """The fields that are texts, numbers or truth values, and what they are."""
    return {field.name: field.type for field in dataclasses.fields(schema) if field.type in (str, int, float, bool)}  # type: ignore[arg-type,misc]


@functools.cache
def _base(schema: type) -> Any:
    base = OmegaConf.structured(schema)
    OmegaConf.set_readonly(base, False)
    return base


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _nested(field: dataclasses.Field[Any]) -> bool:
    return isinstance(field.type, type) and dataclasses.is_dataclass(field.type)


def _check_keys(schema: type, given: Mapping[str, Any], where: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for key, item in given.items():
        if key not in fields:
            raise unknown("key", _join(where, str(key)), [_join(where, name) for name in fields])
        if _nested(fields[key]):
            if not isinstance(item, Mapping):
                raise UserError(f"{_join(where, key)}: got {item!r}, takes a section of keys")
            _check_keys(fields[key].type, item, _join(where, key))  # type: ignore[arg-type]


def _check_literal(item: Any, where: str) -> None:
    """UserError for a text that OmegaConf would look up elsewhere: in the environment, say."""
    if isinstance(item, Mapping):
        for key, value in item.items():
            _check_literal(key, where)
            _check_literal(value, _join(where, str(key)))
    elif isinstance(item, list | tuple):
        for place, value in enumerate(item):
            _check_literal(value, f"{where}[{place}]")
    elif isinstance(item, str) and ("${" in item or item == "???"):
        raise UserError(
            f"{where}: holds '{'${' if '${' in item else item}', which is not interpolated here; give the value itself"
        )


def _in_one_line(error: Exception, where: str) -> str:
    first = str(error).splitlines()[0]
    full = getattr(error, "full_key", None)
    key = _join(where, str(full)) if full else where
    return f"{key}: {first}" if key else first


def _check_values(instance: Any, where: str) -> None:
    for field in dataclasses.fields(instance):
        key, got = _join(where, field.name), getattr(instance, field.name)
        if dataclasses.is_dataclass(got):
            _check_values(got, key)
            continue
        low, high = field.metadata.get("low"), field.metadata.get("high")
        choices = field.metadata.get("choices")
        if choices and got not in choices:
            raise UserError(f"{key}: got '{got}', takes one of: {', '.join(choices)}")
        for number in got if isinstance(got, list) else [got]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_range(key, number, low, high)


def _check_range(key: str, number: float, low: float | None, high: float | None) -> None:
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        if low is None and high is None:
            takes = "a finite number"
        elif high is None:
            takes = f"a number of at least {low}"
        elif low is None:
            takes = f"a number of at most {high}"
        else:
            takes = f"a number from {low} to {high}"
        raise UserError(f"{key}: got {number}, takes {takes}")
