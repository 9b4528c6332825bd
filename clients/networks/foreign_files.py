"""Read the tensors of a network from a user's file, in the names that the network has here."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.storage.states import read_state
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import error_summary
from fedloom.fusion.state import State

WRAPPED = ("state_dict", "model_state_dict", "model", "network")  # keys of a checkpoint that has more than a network
PREFIXES = ("module.", "model.", "_orig_mod.")  # of DataParallel, Lightning and torch.compile
COUNTER = "num_batches_tracked"  # BatchNorm's, which networks may lack


def is_of_torch(path: Path) -> bool:
    """Return whether torch.save wrote the file, as an archive or in its older form. Raises UserError without a file."""
    try:
        with path.open("rb") as file:
            return file.read(4).startswith((b"PK\x03\x04", b"\x80\x02"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def read_tensors(path: Path) -> State:
    """Return the tensors in a safetensors file, or in one of torch.save (loaded with weights_only).

    Raises UserError for a file that is missing, has no tensors or needs code to load.
    """
    if not is_of_torch(path):
        return read_state(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path}: is not a file of tensors alone ({error_summary(error)}); save network.state_dict()"
        ) from None
    for key in WRAPPED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not _is_state(content):
        raise UserError(f"{path}: has no tensors by name; save network.state_dict()")
    return {name: tensor.detach() for name, tensor in content.items()}


def in_names_of(network: nn.Module, state: State) -> State:
    """Return the state in the network's names: without the prefixes of wrappers, and without counters that it lacks."""
    wanted = network.state_dict().keys()
    known = dict.fromkeys(wanted, "") | dict(_own_names(network))
    while not state.keys() & known.keys() and (prefix := next((each for each in PREFIXES if _all_begin(state, each)), "")):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    if not state.keys() >= wanted:
        state = {known.get(name) or name: tensor for name, tensor in state.items()}
    return {name: tensor for name, tensor in state.items() if name in wanted or not name.endswith(COUNTER)}


def _own_names(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors in the user's module (clients.networks.own), and here; nothing for another network."""
    head = getattr(network, "head_name", None)
    for name in network.state_dict() if head is not None else ():
        part, _, rest = name.partition(".")
        yield (rest if part == "extractor" or not head else f"{head}.{rest}"), name


def _all_begin(state: State, prefix: str) -> bool:
    return bool(state) and all(name.startswith(prefix) for name in state)


def _is_state(content: Any) -> bool:
    whole = isinstance(content, Mapping) and content
    return bool(whole) and all(isinstance(key, str) and isinstance(each, Tensor) for key, each in content.items())
