"""Python attributes of a user's strategy or schedule that change during a run. Nothing saves them."""

import hashlib
import io
import pickle
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedloom.conf.package import NAME


class Attributes:
    """The attributes of a run's strategy and schedule, if a user wrote these, and of their classes.

    Args:
        objects: What to watch, by its kind (strategy).
    """

    def __init__(self, **objects: object) -> None:
        self._objects = objects
        self._before = {kind: _digests(item, ()) for kind, item in objects.items()}
        self._named: set[tuple[str, str]] = set()  # kind and attribute: reported before

    def changed(self, number: int) -> Iterator[str]:
        """Yield a warning for each object whose attributes have changed by the end of a round, once for each attribute."""
        for kind, item in self._objects.items():
            before, skipped = self._before[kind], {name for of, name in self._named if of == kind}
            now = _digests(item, skipped)
            names = [name for name in sorted(now) if before.get(name) != now[name]
                     and (name in before or not isinstance(getattr(type(item), name, None), cached_property))]  # fmt: skip
            if names:
                self._named |= {(kind, name) for name in names}
                yield (f"Warning: in or before round {number}, the {kind} {type(item).__name__} changed its attributes "
                       f"{', '.join(f'`{name}`' for name in names)}. Fedloom does not save attributes: a resumed run starts "
                       "without these changes, and forgetting a site does not undo them. Save them with "
                       "context.save_server_state, or compute them from the round's number.")  # fmt: skip
            self._before[kind] = before | now


def _is_own(kind: type) -> bool:
    """Return whether a user wrote the class."""
    return kind.__module__.partition(".")[0] not in (NAME, "builtins", "abc", "typing")


def _digests(item: object, skipped: Collection[str]) -> dict[str, str]:
    """Return a digest of the value of each attribute, of the object and of the user's classes behind it."""
    classes = [vars(kind) for kind in reversed(type(item).__mro__) if _is_own(kind)]
    values = {name: value for content in classes for name, value in content.items() if _is_data(name, value)}
    values |= getattr(item, "__dict__", {})
    return {name: _digest(value) for name, value in values.items() if name not in skipped}


def _is_data(name: str, value: object) -> bool:
    """Return whether an attribute of a class is a value, and no method, property or part of the class itself."""
    return not (name.startswith(("__", "_abc_")) or callable(value) or hasattr(type(value), "__get__"))


def _digest(value: object) -> str:
    """Return a digest of a value's content; of its identity if the content cannot be read."""
    content = io.BytesIO()
    try:
        _Reader(content).dump(value)
    except Exception:  # a lock, an open file, a function: only another object in its place is noticed
        return f"{type(value).__name__} {id(value)}"
    return hashlib.sha256(content.getbuffer()).hexdigest()


class _Reader(pickle.Pickler):
    """Writes tensors by their values, since torch's own pickles contain addresses."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return NotImplemented
        plain = item.detach().cpu().contiguous().reshape(-1)
        return bytes, (plain.view(torch.uint8).numpy().tobytes() + f"{item.dtype} {tuple(item.shape)}".encode(),)
