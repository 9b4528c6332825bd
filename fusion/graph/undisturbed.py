"""A network whose forward sets attributes of its own is left as it was: what a trace or a look sets is taken out again."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

STRUCTURE = ("_parameters", "_buffers", "_modules")


@contextmanager
def undisturbed(network: nn.Module, structure: bool = True) -> Iterator[None]:
    """Afterwards every module's attributes, and what lists, dictionaries and objects among them hold, are as before.

    `structure`: so are parameters, buffers and submodules by their names; what tensors hold is not looked at.
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
    """The tensors among its modules' attributes, and in lists, dictionaries and objects there; parameters, too."""
    seen: set[int] = set()
    found = [_reached(_own(module, structure=True), seen) for module in network.modules()]
    return [one for reached in found for one in reached if isinstance(one, Tensor)]


def _own(module: nn.Module, structure: bool) -> tuple[Any, ...]:
    return tuple(one for key, one in vars(module).items() if structure or key not in STRUCTURE)


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors in a value, and what can change of it: lists, sets, dictionaries and those of objects; each once."""
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
