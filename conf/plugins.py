"""Load classes and functions of other packages, by entry point or as `module:attribute`, when a configuration names them."""

import contextlib
import difflib
import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError, plain, unknown
from fedloom.conf.package import NAME, ROOMS, ROOT, present_name

MOST_CHARACTERS = 200  # characters of options in an error
_allowed: ContextVar[frozenset[str] | None] = ContextVar("allowed", default=None)  # None: every name


@contextlib.contextmanager
def only(names: Iterable[str]) -> Iterator[None]:
    """In a block, let `outside` load nothing but these names: a site runs no code that only a server names."""
    token = _allowed.set(frozenset(names))
    try:
        yield
    finally:
        _allowed.reset(token)


def is_reference(name: object) -> bool:
    """Return whether a name has the form `module:attribute`, such as my_package.nets:TinyNet."""
    if not isinstance(name, str) or name.count(":") != 1:
        return False
    return all(part.isidentifier() for side in name.split(":") for part in side.split("."))


def offered(kind: str) -> list[str]:
    """Return the names that installed packages add to a kind ("network": entry points of the group fedloom.networks)."""
    return sorted(_entry_points(_group(kind), tuple(sys.path)))


def outside(kind: str, name: object, known: Iterable[str], key: str) -> Any:
    """Return the object that a name stands for: `module:attribute`, or an installed package's entry point.

    `known`: this project's names, for the error. Raises UserError, beginning with the name's dotted `key`: no such name,
    module or attribute, or a failed import; and a name that `only` does not allow.
    """
    if (allowed := _allowed.get()) is not None and not (isinstance(name, str) and name in allowed):
        owner = "not part of this project, and the site's owner does not allow it"
        raise UserError(f"{key}: '{name}' is {owner} (site.yaml: networks, objectives, optimizers, domain)")
    if is_reference(name):
        return imported(str(name), key)
    points = _entry_points(_group(kind), tuple(sys.path)).get(name, []) if isinstance(name, str) else []
    if not points:
        raise unknown(kind, name, [*known, *offered(kind)])
    if len({point.value for point in points}) > 1:
        raise UserError(f"{key}: '{name}' means {' and '.join(point.value for point in points)}; write one of these instead")
    return imported(points[0].value, key)


def imported(reference: str, key: str) -> Any:
    """Import and return the object of a reference `module:attribute`. Raise UserError as `outside` does."""
    named, _, attribute = reference.partition(":")
    module = present_name(named)
    try:
        target: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        if (room := lacks.partition(".")[0]) in ROOMS:
            hint = f"{room} is part of the package {NAME}: import {NAME}.{room}"
            raise UserError(f"{key}: module '{module}' cannot be imported: cannot find module '{lacks}'; {hint}") from None
        if lacks and f"{module}.".startswith(f"{lacks}."):
            hint = "install it, or start fedloom in the folder that contains it"
            raise UserError(f"{key}: cannot find module '{lacks}' (of '{reference}'); {hint}") from None
        raise UserError(f"{key}: module '{module}' cannot be imported ({error_summary(error)})") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            hint = "; define it in this script or notebook first" if module == "__main__" else ""
            raise UserError(f"{key}: '{reference}' has no '{part}'{_near(part, target) or hint}")
        target = getattr(target, part)
    return target


def call(function: Callable[..., Any], options: Mapping[str, Any], ours: Mapping[str, Any], name: str, where: str) -> Any:
    """Call the user's function with the project's arguments and the user's options.

    Args:
        function: The function or class.
        options: The user's options.
        ours: The project's arguments.
        name: The function's name, for errors.
        where: The section of the configuration, with which errors begin.

    Returns:
        function(**ours, **options)

    Raises:
        UserError: An option is unknown or missing, or the function fails.
    """
    _check_options(function, options, ours, name, where)
    try:
        return function(**{**ours, **options})
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        usual = {parameter.name: repr(parameter.default) for parameter in parameters(function)[0]}
        changed = [f"{key}={value!r}" for key, value in options.items() if usual.get(key) != repr(value)]
        options_text = f" with {plain(', '.join(changed))[:MOST_CHARACTERS]}" if changed else ""
        raise UserError(f"{where}: '{name}' failed{options_text} ({error_summary(error)})") from error


def parameters(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], bool]:
    """Return a function's named parameters, and whether it accepts other keywords, too (True if Python does not know)."""
    try:
        listed = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each for each in listed if each.kind in named], any(each.kind is each.VAR_KEYWORD for each in listed)


def place_of(error: BaseException) -> str:
    """Return where in the user's own code an error arose, 'nets.py, line 12, in forward'; empty if it arose elsewhere."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _known_code(frame.filename)]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def own_trace(error: BaseException) -> str:
    """Return an error's traceback, in several lines, with the user's own code only."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _known_code(frame.filename)]
    return plain("".join([*traceback.format_list(frames), error_summary(error)]), lines=True)


def _known_code(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package, or this project."""
    ours = [str(ROOT / room) for room in ROOMS]
    theirs = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return file.startswith(("<", *(f"{folder}{os.sep}" for folder in (*ours, *theirs))))


def error_summary(error: BaseException) -> str:
    """Return an error in one line: its type, and its message's first line if that is readable."""
    try:
        text = str(error)
    except Exception:
        text = ""
    lines = plain(text, lines=True).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _check_options(
    function: Callable[..., Any], options: Mapping[str, Any], ours: Mapping[str, Any], name: str, where: str
) -> None:
    known, others = parameters(function)
    names = [each.name for each in known]
    for key in options:
        if key not in names and not others:
            raise unknown(f"option of '{name}'", f"{where}.{key}", [f"{where}.{each}" for each in names])
    for each in known:
        if each.default is each.empty and each.name not in options and each.name not in ours:
            raise UserError(f"{where}.{each.name}: missing; '{name}' needs it")


def _group(kind: str) -> str:
    return f"fedloom.{kind.removesuffix('y')}ies" if kind.endswith("y") else f"fedloom.{kind}s"


@functools.lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, list[metadata.EntryPoint]]:
    """Return the group's entry points by name. `path` (sys.path) is part of the cache's key."""
    points: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=group):
        points.setdefault(point.name, []).append(point)
    return points


def _near(part: str, owner: Any) -> str:
    names = [name for name in dir(owner) if not name.startswith("_")]
    near = difflib.get_close_matches(part, names, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
