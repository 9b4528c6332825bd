"""Errors that are reported in one line, without a traceback: bad input (exit code 2) and failed runs (1)."""

import difflib
import errno
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
_OPTION = re.compile(r"`[^`]*`|'fedloom [^']*'|(?<![\w'-])--([a-z]+(?:-[a-z]+)*)")  # or a command with options
MOST_NAMES = 40  # names in an error
MOST_PATH = 200  # characters of a path in an error
F = TypeVar("F", bound=Callable[..., Any])
NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)  # whatever the file
DISK = (*UNWRITABLE, errno.EACCES, errno.EPERM)


class UserError(ValueError):
    """Bad input. The message says in one line what is wrong, where, and how to correct it.

    `trace`: the lines of the user's own code that failed, which the command line shows below the message; empty: none.
    """

    trace = ""


class MissingDataError(UserError):
    """The data of a domain are not in the data folder."""


class FailedError(RuntimeError):
    """A run that cannot continue, for a reason other than the user's input."""


class DroppedWarning(UserWarning):
    """Options of a configuration that an override drops."""


def say_dropped(by: str, dropped: Iterable[str]) -> None:
    """Warn, in one line, that the key `by` of an override drops these keys of the file, or of overrides before it."""
    warnings.warn(f"{by} drops these settings: {', '.join(dropped)}. Set those that you need after it",
                  DroppedWarning, stacklevel=2)  # fmt: skip


def plain(text: str, lines: bool = False) -> str:
    """Return the text without escape sequences, and with spaces for unprintable characters. `lines`: keep line breaks."""
    text = _ESCAPE.sub("", text)
    return "".join(letter if letter.isprintable() or (lines and letter == "\n") else " " for letter in text)


def public(url: str) -> str:
    """Return a URL without a user's name and password, which no message and no file of a run may show."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", url)


def of_files(error: OSError) -> str:
    """Return a line about an error that the user can fix (wrong path, full disk, permissions); empty for other errors."""
    path = plain(str(error.filename))[:MOST_PATH] if error.filename else ""
    if error.errno in NO_PATH:
        return f"{path or 'a path'}: {error.strerror}; give another path"
    if error.errno in DISK:
        hint = "check this disk" if error.errno == errno.EIO else "free some space or correct the permissions"
        return f"{path or 'the disk'}: {error.strerror}; {hint}, then resume"
    return ""


def of_storage(error: BaseException, folder: Path | None = None) -> str:
    """Return a line about the OSError behind an error if this machine's storage is at fault; empty for other errors.

    At fault are a full, failing or read-only disk, and a file in `folder`, the run's own, that cannot be read or written.
    A line about the user's own code, which raised the OSError, comes first.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and not isinstance(behind, FileNotFoundError):
            own = folder is not None and behind.filename and Path(os.fsdecode(behind.filename)).is_relative_to(folder)
            if behind.errno in UNWRITABLE or own:
                line = of_files(behind) or f"{behind.filename}: {behind.strerror}; correct this, then resume"
                return f"{error}; {line}" if error.__cause__ is behind else line
        behind = behind.__cause__ or behind.__context__
    return ""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Return an error for a `name` of this kind that is not in `known`. It suggests the nearest name and lists all."""
    names = sorted(known)
    near = nearest(str(name), names)
    hint = f"; did you mean '{near}'?" if near else ""
    return UserError(f"unknown {kind} '{name}'{hint} (known: {listed(str(name), names)})")


def locked(key: object, tls: bool = False) -> UserError:
    """Return an error for a private key with a pass phrase. `tls`: the key is of a certificate."""
    how = f"openssl pkey -in {key} -out NEW" if tls else f"ssh-keygen -p -f {key}"
    return UserError(f"{key}: has a pass phrase, and Fedloom does not ask for it; use a key without one ('{how}')")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the entry of `known` with the most similar spelling; empty if none is similar (1: the same)."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=cutoff)), "")


def listed(name: str, known: Iterable[str]) -> str:
    """Return the known names as a text with commas; of over MOST_NAMES, only those similar to `name`, and the total.

    Without names, it is "none".
    """
    names = sorted(known) or ["none"]
    if len(names) > MOST_NAMES:
        names = [*sorted(difflib.get_close_matches(name, names, 8, 0.3)), f"{len(names)} in all"]
    return ", ".join(names)


def for_python(function: F) -> F:
    """Word a function's errors for callers in Python (decorator): `--without-data` becomes `without_data`.

    The TypeError for an unknown keyword says how to write a key of the configuration, which is a text.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        for name, value in options.items():
            if name not in known:
                near, text = nearest(name, known, 0.8), plain(str(value))[:MOST_NAMES]
                hint = f"did you mean '{near}'?" if near else f'write a key of the configuration as a text: "{name}={text}"'
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'; {hint}")
        try:
            return function(*args, **options)
        except UserError as error:
            error.args = tuple(_in_python(arg) if isinstance(arg, str) else arg for arg in error.args)
            raise

    return cast(F, called)


def _in_python(message: str) -> str:
    """Return a message with the command line's options as arguments of a function, except in commands."""
    message = message.replace("add --overwrite", "add overwrite=True").replace("pass --overwrite", "pass overwrite=True")
    return _OPTION.sub(lambda found: found[1].replace("-", "_") if found[1] else found[0], message)
