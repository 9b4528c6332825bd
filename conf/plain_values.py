"""Convert Python values to YAML's: NumPy numbers, paths, tuples and arrays become plain values."""

import dataclasses
import datetime
import numbers
import os
from collections.abc import Mapping
from typing import Any

from fedloom.conf.errors import UserError

MOST_DEPTH = 200
TAKES = "texts, numbers, truth values, paths, lists and dictionaries"


def plain_value(given: Any, where: str, depth: int = 0) -> Any:
    """Return a value as plain values. Raise UserError with the dotted key and the type of a value that has no plain form."""
    if depth > MOST_DEPTH:
        raise UserError(f"{where[:MOST_DEPTH]}...: is nested too deep, or contains itself")
    if given is None or isinstance(given, bool):
        return given
    if (single := _single(given)) is not None:
        return single
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        given = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    if isinstance(given, Mapping):
        return {_key(key, where): plain_value(item, _join(where, str(key)), depth + 1) for key, item in given.items()}
    if isinstance(given, list | tuple | range):
        return [plain_value(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(given)]
    if callable(listed := getattr(given, "tolist", None)):  # arrays and numbers of NumPy, torch and others
        return plain_value(listed(), where, depth + 1)
    raise UserError(f"{where}: got {_of_type(given)}, takes {TAKES}")


def _single(given: Any) -> str | int | float | None:
    """Return a text, a number or a path as a Python str, int or float; None for anything else."""
    if isinstance(given, str):
        return str.__str__(given)
    if isinstance(given, os.PathLike):
        return os.fsdecode(given)
    if isinstance(given, datetime.date):
        return given.isoformat()
    if isinstance(given, numbers.Integral):
        return int(given)
    return float(given) if isinstance(given, numbers.Real) else None


def _key(key: Any, where: str) -> str | int | float | bool:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bool | int | float):
        return key
    raise UserError(f"{where}: has a key that is {_of_type(key)}, takes texts")


def _of_type(given: Any) -> str:
    kind = type(given)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a value of the type {module}{kind.__qualname__}"


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
