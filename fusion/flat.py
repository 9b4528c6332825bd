"""States whose tensors are views of one vector, so that a sum, a check or a copy takes one operation and not one a tensor.

A `FlatState` is a state like any other: it has the same names, shapes and values, and is stored and sent as the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from fedloom.fusion.state import State

# A module with one of these changes its state when it is saved or loaded.
HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
METHODS = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of tensors, sorted by their names


@dataclass(frozen=True)
class Layout:
    """The names and shapes of a state's tensors, in the order in which a vector holds them: sorted by name."""

    shapes: Shapes

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of entries of the tensors."""
        return [torch.Size(shape).numel() for _, shape in self.shapes]

    def state(self, vector: Tensor) -> "FlatState":
        """Return the state that consists of the parts of a vector [n]. It shares memory with the vector."""
        parts = vector.split(self.sizes)
        views = {name: part.view(shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}
        return FlatState(self, vector, views)


class FlatState(dict[str, Tensor]):
    """A state that consists of views of `vector`, in the order of `layout`.

    Once a tensor is replaced, it is an ordinary state: `flat_of` then returns None.
    """

    def __init__(self, layout: Layout, vector: Tensor, views: State) -> None:
        super().__init__(views)
        self.layout, self.vector, self._views = layout, vector, tuple(views.values())

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)

    @property
    def whole(self) -> bool:
        """Whether the tensors are still the views of the vector."""
        return len(self) == len(self._views) and all(map(_same, self.values(), self._views))


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other


def flat_of(state: Mapping[str, Tensor]) -> FlatState | None:
    """Return the state if it is flat, else None."""
    return state if isinstance(state, FlatState) and state.whole else None


def flattened(state: Mapping[str, Tensor]) -> State:
    """Return a flat copy of the state on the CPU; the state itself if it is flat, or its tensors differ in type."""
    kinds = {(tensor.dtype, tensor.device) for tensor in state.values()}
    if len(kinds) != 1 or flat_of(state) is not None:
        return state if isinstance(state, dict) else dict(state)
    layout = layout_of(state)
    vector = torch.cat([state[name].detach().reshape(-1) for name, _ in layout.shapes])
    return layout.state(vector.cpu())  # one transfer from a GPU


def fill(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a state into a module's parameters and buffers. Raises RuntimeError for other names or shapes."""
    own, whole = module.state_dict(), flat_of(state)
    alike = own.keys() == state.keys() and all(own[name].shape == state[name].shape for name in own)
    if whole is None or not alike or not all(map(_is_plain, module.modules())):
        module.load_state_dict(state)
        return
    first = next(iter(own.values()))
    there = first.device == whole.vector.device
    views = whole if there else whole.layout.state(whole.vector.to(first.device))  # one transfer to a GPU
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(views[name])


def _is_plain(module: nn.Module) -> bool:
    """Return whether the module's state is its own tensors, and load_state_dict only copies into them."""
    kind = type(module)
    return not any(getattr(module, hooks) for hooks in HOOKS) and all(
        getattr(kind, method) is getattr(nn.Module, method) for method in METHODS
    )


def copy_of(state: Mapping[str, Tensor]) -> State:
    """Return a copy of the state, which shares no memory with it; flat if the state is flat."""
    whole = flat_of(state)
    return whole.layout.state(whole.vector.clone()) if whole is not None else {n: t.clone() for n, t in state.items()}


def layout_of(state: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a state's tensors; the same object for the same names and shapes."""
    return layout_of_shapes(tuple(sorted((name, tuple(tensor.shape)) for name, tensor in state.items())))


@lru_cache(maxsize=256)
def layout_of_shapes(shapes: Shapes) -> Layout:
    """Return the layout of these names and shapes, which must be sorted; the same object for the same ones."""
    return Layout(shapes)
