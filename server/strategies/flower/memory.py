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
    """Return the attributes that differ from a new strategy, by `attribute/kind/key`.

    Raises:
        FailedError: A tensor cannot hold an attribute.
    """
    found: State = {}
    for name, given in vars(strategy).items():
        made = vars(fresh).get(name)
        if given is made or (isinstance(given, str | bool | int | float) and given == made):
            continue
        parts = _parts(given)
        if parts is None and given != made:
            raise FailedError(f"strategy '{type(strategy).__name__}': its attribute '{name}' became a "
                              f"{type(given).__name__}, which cannot be saved to resume the run")  # fmt: skip
        found |= {f"{name}/{kind}/{key}": tensor for kind, key, tensor in parts or ()}
    return found


def put_back(strategy: Any, state: Mapping[str, Tensor]) -> Any:
    """Restore the saved attributes of a new strategy, and return it."""
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for path, tensor in state.items():
        name, kind, key = path.split("/", 2)
        groups.setdefault((name, kind), {})[key] = tensor
    for (name, kind), parts in groups.items():
        setattr(strategy, name, _made(kind, {key: tensor for key, tensor in parts.items() if key != _NONE}))
    return strategy


def arrays_of(state: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a state as Flower's record, sorted by name: some strategies use positions, and the ledger has no order."""
    return ArrayRecord({name: Array(state[name].numpy().copy()) for name in sorted(state)})


def state_of(record: ArrayRecord) -> State:
    """Return Flower's record as a state.

    Raises:
        FailedError: An entry is not finite.
    """
    found = {name: _tensor(array.numpy()) for name, array in record.items()}
    if odd := next((name for name, one in found.items() if not bool(torch.isfinite(one).all())), ""):
        raise FailedError(f"strategy: its tensor '{odd}' has entries that are not finite; smaller steps may help")
    return found


_NONE = "none"  # marks a collection, which may be empty


def _parts(given: Any) -> list[tuple[str, str, Tensor]] | None:
    """Return kind, key and tensor of each part, or None for a type that cannot be saved."""
    if isinstance(given, bool):
        return None
    if isinstance(given, int):
        return [(WHOLE, "", torch.tensor(given))]
    if isinstance(given, float):
        return [(NUMBER, "", torch.tensor(given, dtype=torch.float64))]
    if isinstance(given, np.ndarray | np.generic):
        return [(ARRAY, "", _tensor(np.asarray(given)))]
    items = [(kind, dict(pairs)) for kind, pairs in _collections(given)]
    if not items or not all(isinstance(one, np.ndarray | np.generic) for one in items[0][1].values()):
        return None
    kind, arrays = items[0]
    return [(kind, _NONE, torch.zeros(0)), *((kind, key, _tensor(np.asarray(one))) for key, one in arrays.items())]


def _collections(given: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(given, ArrayRecord):
        yield RECORD, ((name, array.numpy()) for name, array in given.items())
    elif isinstance(given, dict) and all(isinstance(key, str) for key in given):
        yield DICTIONARY, given.items()
    elif isinstance(given, list):
        yield LIST, ((f"{place:06}", one) for place, one in enumerate(given))


def _made(kind: str, parts: Mapping[str, Tensor]) -> Any:
    if kind in (WHOLE, NUMBER):
        return parts[""].item()
    if kind == ARRAY:
        return parts[""].numpy()
    if kind == RECORD:
        return arrays_of(parts)
    return {key: one.numpy() for key, one in parts.items()} if kind == DICTIONARY else [
        parts[key].numpy() for key in sorted(parts)
    ]  # fmt: skip


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array))
