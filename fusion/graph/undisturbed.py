"""Restore networks whose forward sets attributes, after a trace or an observation."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

STRUCTURE = ("_parameters", "_buffers", "_modules")


@contextmanager
def undisturbed(network: nn.Module, structure: bool = True) -> Iterator[None]:
    """Restore every module's attributes afterwards, with the contents of lists, dictionaries and objects in them.

    `structure`: also restore parameters, buffers and submodules by name. The values of tensors are not restored.
    """
    seen: set[int] = set()
    reached = [one for module in network.modules() for one in _reached(_own(module, structure), seen)]
    held = [one for one in reached if not isinstance(one, Tensor)]
    before = [(vars(module), dict(vars(module))) for module in network.modules()]
    before += [(one, dict(one) if isinstance(one, dict) else list(one)) for one in held]
    try:
        yield
    finally:
        for one, content in before:
            one.clear()
            one.extend(content) if isinstance(one, list | deque) else one.update(content)


def tensors_of(network: nn.Module) -> list[Tensor]:
    """Return the tensors in its modules' attributes, and in lists, dictionaries and objects there; also parameters."""
    seen: set[int] = set()
    found = [_reached(_own(module, structure=True), seen) for module in network.modules()]
    return [one for reached in found for one in reached if isinstance(one, Tensor)]


def _own(module: nn.Module, structure: bool) -> tuple[Any, ...]:
    return tuple(one for key, one in vars(module).items() if structure or key not in STRUCTURE)


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield, once each, the tensors and mutable containers in a value: lists, sets, dictionaries, and those of objects."""
    if isinstance(value, Tensor | list | set | deque | dict):
        held = value
    elif isinstance(value, tuple):
        held = None
    elif isinstance(value, nn.Module | type | ModuleType | FunctionType) or not isinstance(
        own := getattr(value, "__dict__", None), dict
    ):
        return
    else:
        held = own
    if held is not None:
        if id(held) in seen:
            return
        seen.add(id(held))
        yield held
    if not isinstance(value, Tensor):
        inside = value if held is None else list(held.values() if isinstance(held, dict) else held)
        for one in inside:
            yield from _reached(one, seen)
