"""Restore objects that change their own attributes: networks after a trace, and users' parts before the next site."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STRUCTURE = ("_parameters", "_buffers", "_modules")
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
VALUES = Tensor | np.ndarray | torch.Generator | np.random.Generator | random.Random


class Snapshot:
    """The attributes of an object, with the contents of lists, dictionaries and objects in them, to be restored later.

    Args:
        root: A network, or another object, or a tuple of objects.
        structure: Whether parameters, buffers and submodules by name belong to it.
        values: Whether the values of arrays, random generators and tensors belong to it, without those of the state
            (`state_dict`) if `root` is a network.
    """

    def __init__(self, root: object, structure: bool = True, values: bool = False) -> None:
        reached = list(_reached(root, structure))
        held = [container for container in reached if not isinstance(container, VALUES)]
        self._contents = [(each, dict(each) if isinstance(each, dict) else list(each)) for each in held]
        named = root.state_dict(keep_vars=True).values() if values and isinstance(root, nn.Module) else ()
        state = {id(tensor) for tensor in named}
        self._values = [_value(each) for each in reached if values and isinstance(each, VALUES) and id(each) not in state]

    def restore(self) -> None:
        """Give all objects the attributes that they had."""
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
    return [value for value in _reached(network) if isinstance(value, Tensor)]


def _reached(value: Any, structure: bool = True) -> Iterator[Any]:
    """Yield, once each, the VALUES and mutable containers in a value: lists, sets, dictionaries, and those of objects."""
    waiting, seen = [value], set[int]()
    while waiting:
        value = waiting.pop()
        if type(value) in PLAIN:
            continue
        inside = _parts(value, structure) if isinstance(value, nn.Module) else _inside(value)
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


def _parts(module: nn.Module, structure: bool) -> tuple[Any, Sequence[Any]]:
    """Return the attributes of a module, and what is in them. Without `structure`, submodules stand for STRUCTURE."""
    own = vars(module)
    if structure:
        return own, list(own.values())
    return own, [*(value for key, value in own.items() if key not in STRUCTURE), *module.children()]


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
    if isinstance(value, MethodType):
        return None, (value.__self__,)
    if isinstance(value, partial):
        return None, (value.func, *value.args, *value.keywords.values())
    if isinstance(value, type | ModuleType) or (_standard(type(value)) and not isinstance(value, FunctionType)):
        return None
    own = getattr(value, "__dict__", None)
    return (own, list(own.values())) if isinstance(own, dict) else None
