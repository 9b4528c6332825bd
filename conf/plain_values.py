"""Convert Python values to YAML's: NumPy numbers, paths, tuples, arrays, classes and functions become plain values."""

import dataclasses
import datetime
import importlib.util
import inspect
import numbers
import os
from collections.abc import Mapping
from math import prod
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.values import join

MOST_DEPTH = 200
MOST_NUMBERS = 10_000  # of an array or a nested list of numbers
MOST_DIMENSIONS = 6  # of such a list
MAIN = "__main__"  # the module of a script or notebook
TAKES = "texts, numbers, truth values, paths, lists, dictionaries, and classes and functions of a module"


class ElsewhereError(UserError):
    """A class or function of a script or notebook, which only this process can import."""


def plain_value(value: Any, where: str, depth: int = 0, *, here: bool = False) -> Any:
    """Return a value as plain dicts, lists, texts and numbers. Raise UserError, with the key `where`, for other types.

    `here`: only this process uses the value, so classes and functions of its script or notebook are possible, too.
    """
    if depth > MOST_DEPTH:
        raise UserError(f"{where[:MOST_DEPTH]}...: is nested too deep, or contains itself")
    if value is None or isinstance(value, bool):
        return value
    if (single := _single(value)) is not None:
        return single
    if isinstance(value, type) or inspect.isroutine(value):
        return reference_to(value, where, here)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            _key(key, where): plain_value(item, join(where, str(key)), depth + 1, here=here) for key, item in value.items()
        }
    if _size(value) > MOST_NUMBERS:
        raise UserError(f"{where}: got {_of_type(value)} with over {MOST_NUMBERS:,} numbers. A configuration holds no data: "
                        "write a function that returns them, and pass it or its name 'module:function'")  # fmt: skip
    if isinstance(value, list | tuple | range):
        return [plain_value(item, f"{where}[{index}]", depth + 1, here=here) for index, item in enumerate(value)]
    if callable(listed := getattr(value, "tolist", None)):  # arrays and numbers of NumPy, torch and others
        return plain_value(listed(), where, depth + 1, here=here)
    raise UserError(f"{where}: got {_of_type(value)}, takes {TAKES}")


def plain_here(value: Any, where: str) -> tuple[Any, ElsewhereError | None]:
    """Return `plain_value` for this process, and the error if another process cannot import a class or function of it."""
    try:
        return plain_value(value, where), None
    except ElsewhereError as error:
        return plain_value(value, where, here=True), error


def reference_to(value: Any, where: str, here: bool = False) -> str:
    """Return the reference `module:name` with which other processes import a class or function.

    Raises UserError, with the key `where`, for one that they cannot import: of a script, a notebook or another function.
    `here`: one of this process's script or notebook is possible.
    """
    module, name = value.__module__ or "", value.__qualname__
    advice = "move it to the top level of a module (a file that you import), and pass it or its name 'module:NAME'"
    if "<" in name:
        raise UserError(f"{where}: '{name}' is defined inside a function or expression, where other processes cannot import "
                        f"it; {advice}")  # fmt: skip
    if module == MAIN and not here:
        raise ElsewhereError(f"{where}: '{name}' is defined in a script or notebook, where other processes cannot import "
                             f"it; {advice}; or set engine.name=inline (in a sweep also parallel=1)")  # fmt: skip
    if _importable(module, name) != value:
        raise UserError(f"{where}: importing '{module}:{name}' does not give this object; {advice}")
    return f"{module}:{name}"


def _importable(module: str, name: str) -> Any:
    """Return the object that a new process imports as `module:name`, or this one from its script; None if this fails."""
    try:
        found = module == MAIN or importlib.util.find_spec(module)
        target: Any = importlib.import_module(module) if found else None
    except (Exception, SystemExit):  # also of a module that was made by hand
        return None
    for part in name.split("."):
        target = getattr(target, part, None)
    return target


def _size(value: Any, depth: int = 0) -> int:
    """Return how many numbers an array or nested list of numbers has, judged by its first entries; 0 for anything else."""
    if isinstance(value, list | tuple | range) and len(value) and depth < MOST_DIMENSIONS:
        inner = [1 if isinstance(entry, numbers.Number) else _size(entry, depth + 1) for entry in value[:2]]
        return max(inner) * len(value)
    shape = getattr(value, "shape", ())
    return prod(shape) if isinstance(shape, tuple) and callable(getattr(value, "tolist", None)) else 0


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
