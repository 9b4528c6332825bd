"""The state of a Flower strategy between rounds (m_t, v_t, momentum), as tensors and back with the same bits."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedloom.conf.errors import FailedError
from fedloom.fusion.state import State

DICTIONARY, LIST, RECORD, ARRAY, WHOLE, NUMBER = "dictionary", "list", "record", "array", "whole", "number"


def remembered(strategy: Any, fresh: Any) -> State:
    """Return the strategy's attributes that differ from a `fresh` one, as tensors named `attribute/kind/key`.

    Raises:
        FailedError: An attribute cannot be stored as tensors.
    """
    state: State = {}
    for name, value in vars(strategy).items():
        initial = vars(fresh).get(name)
        if value is initial or (isinstance(value, str | bool | int | float) and value == initial):
            continue
        parts = _parts(value)
        if parts is None and value != initial:
            raise FailedError(f"strategy '{type(strategy).__name__}': its attribute '{name}' became a "
                              f"{type(value).__name__}, which cannot be saved to resume the run")  # fmt: skip
        state |= {f"{name}/{kind}/{key}": tensor for kind, key, tensor in parts or ()}
    return state


def put_back(strategy: Any, state: Mapping[str, Tensor]) -> Any:
    """Set the attributes that `remembered` saved on a new strategy; return it."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for path, tensor in state.items():
        name, kind, key = path.split("/", 2)
        groups.setdefault((name, kind), {})[key] = tensor
    for (name, kind), parts in groups.items():
        setattr(strategy, name, _value(kind, {key: tensor for key, tensor in parts.items() if key != _NONE}))
    return strategy


def arrays_of(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a state as Flower's record, sorted by name: some strategies use positions, and the ledger has no order."""
    return ArrayRecord({name: Array(state[name].numpy().copy()) for name in sorted(state)})


def state_of(record: ArrayRecord) -> State:
    """Return Flower's record as a state.

    Raises:
        FailedError: An entry is not finite.
    """
    state = {name: _tensor(array.numpy()) for name, array in record.items()}
    if infinite := next((name for name, tensor in state.items() if not bool(torch.isfinite(tensor).all())), ""):
        raise FailedError(f"strategy: its tensor '{infinite}' has entries that are not finite; smaller steps may help")
    return state


_NONE = "none"  # marks a collection, which may be empty


def _parts(value: Any) -> list[tuple[str, str, Tensor]] | None:
    """Return kind, key and tensor of each part, or None for a type that cannot be saved."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return [(WHOLE, "", torch.tensor(value))]
    if isinstance(value, float):
        return [(NUMBER, "", torch.tensor(value, dtype=torch.float64))]
    if isinstance(value, np.ndarray | np.generic):
        return [(ARRAY, "", _tensor(np.asarray(value)))]
    items = [(kind, dict(pairs)) for kind, pairs in _collections(value)]
    if not items or not all(isinstance(array, np.ndarray | np.generic) for array in items[0][1].values()):
        return None
    kind, arrays = items[0]
    return [(kind, _NONE, torch.zeros(0)), *((kind, key, _tensor(np.asarray(array))) for key, array in arrays.items())]


def _collections(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ArrayRecord):
        yield RECORD, ((name, array.numpy()) for name, array in value.items())
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        yield DICTIONARY, value.items()
    elif isinstance(value, list):
        yield LIST, ((f"{index:06}", entry) for index, entry in enumerate(value))


def _value(kind: str, parts: Mapping[str, Tensor]) -> Any:
    if kind in (WHOLE, NUMBER):
        return parts[""].item()
    if kind == ARRAY:
        return parts[""].numpy()
    if kind == RECORD:
        return arrays_of(parts)
    return {key: array.numpy() for key, array in parts.items()} if kind == DICTIONARY else [
        parts[key].numpy() for key in sorted(parts)
    ]  # fmt: skip


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array))
