"""Restore networks whose forward sets attributes, after a trace or an observation."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

STRUCTURE = ("_parameters", "_buffers", "_modules")
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


@contextmanager
def undisturbed(network: nn.Module, structure: bool = True) -> Iterator[None]:
    """Restore all modules' attributes after the context, with the contents of lists, dictionaries and objects in them.

    `structure`: also restore parameters, buffers and submodules by name. The values of tensors are not restored.
    """
    seen: set[int] = set()
    reached = [container for module in network.modules() for container in _reached(_own(module, structure), seen)]
    held = [container for container in reached if not isinstance(container, Tensor)]
    before = [(vars(module), dict(vars(module))) for module in network.modules()]
    before += [(container, dict(container) if isinstance(container, dict) else list(container)) for container in held]
    try:
        yield
    finally:
        for container, content in before:
            container.clear()
            container.extend(content) if isinstance(container, list | deque) else container.update(content)


def tensors_of(network: nn.Module) -> list[Tensor]:
    """Return the tensors in a network's attributes, and in lists, dictionaries and objects there; also parameters."""
    seen: set[int] = set()
    values = [_reached(_own(module, structure=True), seen) for module in network.modules()]
    return [value for reached in values for value in reached if isinstance(value, Tensor)]


def _own(module: nn.Module, structure: bool) -> tuple[Any, ...]:
    return tuple(value for key, value in vars(module).items() if structure or key not in STRUCTURE)


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield, once each, the tensors and mutable containers in a value: lists, sets, dictionaries, and those of objects."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if type(value) in PLAIN:
            continue
        inside = _inside(value)
        if inside is None:
            continue
        container, items = inside
        if container is not None:
            if id(container) in seen:
                continue
            seen.add(id(container))
            yield container
        waiting += reversed(items)


def _inside(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the mutable container that is to be held (None for a tuple), and what is in it; None if nothing is."""
    if isinstance(value, Tensor):
        return value, ()
    if isinstance(value, dict):
        return value, list(value.values())
    if isinstance(value, list | set | deque):
        return value, list(value)
    if isinstance(value, tuple):
        return None, value
    if isinstance(value, nn.Module | type | ModuleType | FunctionType):
        return None
    own = getattr(value, "__dict__", None)
    return (own, list(own.values())) if isinstance(own, dict) else None
