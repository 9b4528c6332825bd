"""Restore networks whose forward sets attributes: after a trace or an observation, or before another site uses them."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STRUCTURE = ("_parameters", "_buffers", "_modules")
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
VALUES = Tensor | np.ndarray | torch.Generator | np.random.Generator | random.Random


class Snapshot:
    """All modules' attributes, with the contents of lists, dictionaries and objects in them, to be restored later.

    Args:
        network: The network.
        structure: Whether parameters, buffers and submodules by name belong to it.
        values: Whether the values of arrays, random generators and tensors belong to it, without those of the network's
            state (`state_dict`).
    """

    def __init__(self, network: nn.Module, structure: bool = True, values: bool = False) -> None:
        seen: set[int] = set()
        reached = [container for module in network.modules() for container in _reached(_own(module, structure), seen)]
        held = [container for container in reached if not isinstance(container, VALUES)]
        self._contents = [(vars(module), dict(vars(module))) for module in network.modules()]
        self._contents += [(each, dict(each) if isinstance(each, dict) else list(each)) for each in held]
        state = {id(tensor) for tensor in network.state_dict(keep_vars=True).values()} if values else set()
        self._values = [_value(each) for each in reached if values and isinstance(each, VALUES) and id(each) not in state]

    def restore(self) -> None:
        """Give all modules the attributes that they had."""
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, list | deque) else container.update(content)
        with torch.no_grad():
            for put_back in self._values:
                put_back()


def _value(item: Any) -> Callable[[], object]:
    """Return a function that gives a tensor, an array or a random generator its value of now."""
    if isinstance(item, Tensor):
        return partial(_fill, item, item.detach().clone())
    if isinstance(item, np.ndarray):
        return partial(np.copyto, item, item.copy())
    if isinstance(item, torch.Generator):
        return partial(item.set_state, item.get_state())
    if isinstance(item, np.random.Generator):
        return partial(setattr, item.bit_generator, "state", item.bit_generator.state)
    return partial(item.setstate, item.getstate())


def _fill(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape:
        tensor.resize_(value.shape)
    tensor.copy_(value)


@contextmanager
def undisturbed(network: nn.Module, structure: bool = True, values: bool = False) -> Iterator[None]:
    """Restore a network's attributes after the context; arguments as of `Snapshot`."""
    snapshot = Snapshot(network, structure, values)
    try:
        yield
    finally:
        snapshot.restore()


def tensors_of(network: nn.Module) -> list[Tensor]:
    """Return the tensors in a network's attributes, and in lists, dictionaries and objects there; also parameters."""
    seen: set[int] = set()
    values = [_reached(_own(module, structure=True), seen) for module in network.modules()]
    return [value for reached in values for value in reached if isinstance(value, Tensor)]


def _own(module: nn.Module, structure: bool) -> tuple[Any, ...]:
    return tuple(value for key, value in vars(module).items() if structure or key not in STRUCTURE)


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield, once each, the VALUES and mutable containers in a value: lists, sets, dictionaries, and those of objects."""
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


def _standard(kind: type) -> bool:
    """Return whether a class is of Python itself: its objects, such as loggers, may belong to the whole program."""
    return kind is not SimpleNamespace and kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _inside(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return the mutable container that is to be held (None for a tuple), and what is in it; None if nothing is."""
    if isinstance(value, VALUES):
        return value, ()
    if isinstance(value, dict):
        return value, list(value.values())
    if isinstance(value, list | set | deque):
        return value, list(value)
    if isinstance(value, tuple):
        return None, value
    if isinstance(value, nn.Module | type | ModuleType | FunctionType) or _standard(type(value)):
        return None
    own = getattr(value, "__dict__", None)
    return (own, list(own.values())) if isinstance(own, dict) else None
