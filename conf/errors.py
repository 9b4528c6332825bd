"""Errors that are told in one line, without a traceback: bad input (exit code 2), and runs that failed (1)."""

import difflib
import errno
import re
from collections.abc import Iterable

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
MOST_TOLD = 40  # names that an error lists
MOST_PATH = 200  # letters of a path in an error
NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


class UserError(ValueError):
    """Bad input. The message says what, where and how to mend it, in one line."""


class FailedError(RuntimeError):
    """A run that cannot go on, for a reason that is none of the user's input."""


def plain(text: str, lines: bool = False) -> str:
    """A text from elsewhere without what steers a terminal: no escape sequences, nothing unprintable (`lines`: but ends)."""
    text = _ESCAPE.sub("", text)
    return "".join(letter if letter.isprintable() or (lines and letter == "\n") else " " for letter in text)


def of_files(error: OSError) -> str:
    """What the system refuses a user's files, in a line that says how to mend it; empty for what is none of theirs."""
    path = plain(str(error.filename))[:MOST_PATH] if error.filename else ""
    if error.errno in NO_PATH:
        return f"{path or 'a path'}: {error.strerror}; give another path"
    if error.errno in DISK:
        return f"{path or 'the disk'}: {error.strerror}; make room or mend permissions, then resume"
    return ""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not among `known`: suggests the nearest one and lists them, unless they are many."""
    names = sorted(known)
    near = nearest(str(name), names)
    hint = f"; did you mean '{near}'?" if near else ""
    return UserError(f"unknown {kind} '{name}'{hint} (known: {listed(str(name), names)})")


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of `known` that is spelt most like it; empty if none is."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)), "")


def listed(name: str, known: Iterable[str]) -> str:
    """The names in a row, sorted; of many those spelt most like `name`, and their number."""
    names = sorted(known)
    if len(names) > MOST_TOLD:
        names = [*sorted(difflib.get_close_matches(name, names, 8, 0.3)), f"{len(names)} in all"]
    return ", ".join(names)
