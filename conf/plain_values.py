"""Convert Python values to YAML's: NumPy numbers, paths, tuples and arrays become plain values."""

import dataclasses
import datetime
import numbers
import os
from collections.abc import Mapping
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.values import join

MOST_DEPTH = 200
TAKES = "texts, numbers, truth values, paths, lists and dictionaries"


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """Return a value as plain dicts, lists, texts and numbers. Raise UserError, with the key `where`, for other types."""
    if depth > MOST_DEPTH:
        raise UserError(f"{where[:MOST_DEPTH]}...: is nested too deep, or contains itself")
    if value is None or isinstance(value, bool):
        return value
    if (single := _single(value)) is not None:
        return single
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key, where): plain_value(item, join(where, str(key)), depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain_value(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if callable(listed := getattr(value, "tolist", None)):  # arrays and numbers of NumPy, torch and others
        return plain_value(listed(), where, depth + 1)
    raise UserError(f"{where}: got {_of_type(value)}, takes {TAKES}")


def _single(value: Any) -> str | int | float | None:
    """Return a text, a number or a path as a Python str, int or float; None for anything else."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else None


def _key(key: Any, where: str) -> str | int | float | bool:
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bool | int | float):
        return key
    raise UserError(f"{where}: has a key that is {_of_type(key)}, takes texts")


def _of_type(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a value of the type {module}{kind.__qualname__}"
