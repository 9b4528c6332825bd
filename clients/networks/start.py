"""Start from a state of the user's own, and freeze parts of a network: `network.start` and `network.freeze`."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.networks.base import WEIGHT_OPTIONS, Network
from fedloom.clients.networks.foreign_files import names_in, read_tensors
from fedloom.conf.errors import UserError, plain
from fedloom.conf.typed import build, option
from fedloom.fusion.state import BATCH_NORM, State

START, FREEZE = "network.start", "network.freeze"
MOST_LINES = 20  # tensors that the user is shown


@dataclass(frozen=True)
class WeightOptions:
    """Options of every network, in addition to its own."""

    start: str = option(
        "", "file with weights to start from: .safetensors, or a state_dict in .pt; others are drawn", path=True
    )
    freeze: list[str] = option([], "tensors that stay as they start, by glob patterns of their names: extractor.*")


def weight_options(section: Mapping[str, Any]) -> WeightOptions:
    """Return the options in a section `network`. Raises UserError for values of a wrong type."""
    return build(WeightOptions, {key: section[key] for key in WEIGHT_OPTIONS if key in section}, "network")


# Freezing


def freeze(network: Network, patterns: Sequence[str]) -> Network:
    """Freeze the tensors that match a pattern, and return the network.

    BatchNorm layers whose statistics are frozen use these statistics in training, too.

    Raises UserError for a pattern that matches nothing, and if nothing remains to train.
    """
    names = list(states := network.state_dict())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"{FREEZE}: '{plain(pattern)}' matches no tensor of the network; it has {_listed(states)}")
    still = frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in still)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"{FREEZE}: the patterns match all trainable weights; leave some, such as the head")
    for path, module in network.named_modules():
        if isinstance(module, BATCH_NORM) and f"{path}.running_mean" in still:
            module.register_forward_pre_hook(_use_statistics)
    network.frozen = still
    return network


def _use_statistics(module: nn.Module, _: Any) -> None:
    module.training = False


# Starting


def started(state: State, path: str, network: Network) -> State:
    """Return a network's initial state with the tensors of a file that fit it by name and shape."""
    return {**state, **_fitting(state, path, network)[0]}


def start_lines(path: str, network: Network) -> list[str]:
    """Return lines that say which tensors of a file fit a network, with a table of those that do not."""
    state = network.state_dict()
    fits, odd = _fitting(state, path, network)
    lines = [f"{START}: {len(fits)} of {len(state)} tensors start from {path}"]
    rows = [("tensor", "in the file", "in the network"), *odd[:MOST_LINES]] if odd else []
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + ([f"and {len(odd) - MOST_LINES} more"] if len(odd) > MOST_LINES else [])


def _fitting(state: Mapping[str, Tensor], path: str, network: Network) -> tuple[State, list[tuple[str, str, str]]]:
    """Return the file's tensors that fit, by the network's names, and a row for each other tensor of the two.

    Raises UserError if no tensor fits, or one is not finite.
    """
    found, fits, odd = _read(path), State(), list[tuple[str, str, str]]()
    names = {here: name for name, here in names_in(network, found).items() if here in state}
    for name, tensor in state.items():
        file = found.get(names.get(name, ""))
        if file is None:
            odd.append((name, "-", str(list(tensor.shape))))
        elif file.shape != tensor.shape:
            odd.append((name, str(list(file.shape)), str(list(tensor.shape))))
        elif file.dtype.is_floating_point != tensor.dtype.is_floating_point:
            odd.append((name, str(file.dtype), str(tensor.dtype)))
        elif not torch.isfinite(file.to(tensor.dtype)).all():
            raise UserError(f"{START}: {path}: tensor '{plain(names[name])}' has NaN or infinite values; use another file")
        else:
            fits[name] = file.to(tensor.dtype, copy=True)
    odd += [(plain(name), str(list(tensor.shape)), "-") for name, tensor in found.items() if name not in names.values()]
    if not fits:
        raise UserError(f"{START}: no tensor in {path} fits the network by name and shape; the file has {_listed(found)}, "
                        f"the network {_listed(state)}")  # fmt: skip
    return fits, odd


def _read(path: str) -> State:
    try:
        stat = Path(path).stat()
        return _read_once(Path(path), stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise UserError(f"{START}: {path} cannot be read ({error.strerror})") from None
    except UserError as error:
        raise UserError(f"{START}: {error}") from None


@functools.lru_cache(maxsize=4)
def _read_once(path: Path, *_: int) -> State:
    return read_tensors(path)


def _listed(state: Mapping[str, Tensor]) -> str:
    """Return the names and shapes of the first tensors."""
    first = [f"{plain(name)} {list(tensor.shape)}" for name, tensor in list(state.items())[:3]]
    return ", ".join(first) + (", ..." if len(state) > len(first) else "") or "nothing"
