"""Read the tensors of a network from a user's file, in the names that the network has here."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.networks.base import EXTRACTOR, HEAD, Network
from fedloom.clients.storage.states import read_state
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

WRAPPED = ("state_dict", "model_state_dict", "model", "network")  # keys of a checkpoint that has more than a network
PREFIXES = ("module.", "model.", "_orig_mod.")  # of DataParallel, Lightning and torch.compile
COUNTER = "num_batches_tracked"  # BatchNorm's, which networks may lack


def is_of_torch(path: Path) -> bool:
    """Return whether torch.save wrote the file, as an archive or in its older form. Raises UserError without a file."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is a device or a pipe; name a file")
    try:
        with path.open("rb") as file:
            return file.read(4).startswith((b"PK\x03\x04", b"\x80\x02"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def read_tensors(path: Path) -> State:
    """Return the tensors in a safetensors file, or in one of torch.save (loaded with weights_only: no code in it runs).

    Raises UserError for a file that is missing, needs code to load, or has no dense tensors by name.
    """
    if not is_of_torch(path):
        return read_state(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch, about odd tensors
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch's own text advises to load the file without this protection
        raise UserError(
            f"{path} cannot be loaded; save only the weights: torch.save(network.state_dict(), 'net.pt')"
        ) from None
    for key in WRAPPED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not (isinstance(content, Mapping) and content and all(map(_is_named, content.items()))):
        raise UserError(f"{path} has no state_dict of dense tensors; save one: torch.save(network.state_dict(), 'net.pt')")
    return {name: tensor.detach() for name, tensor in content.items()}


def in_names_of(network: nn.Module, state: State) -> State:
    """Return the state in the network's names: without the prefixes of wrappers, and without counters that it lacks."""
    wanted = network.state_dict().keys()
    renamed = {name: state[other] for other, name in names_in(network, state).items()}
    return {name: tensor for name, tensor in renamed.items() if name in wanted or not name.endswith(COUNTER)}


def names_in(network: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the network's name for each name of a file's tensors. Unknown names only lose the prefixes of wrappers."""
    wanted = network.state_dict().keys()
    known, found = dict(_own_names(network)), {name: name for name in names}
    while not known.keys() & found.values() and not wanted & set(found.values()):
        prefix = next((each for each in PREFIXES if any(name.startswith(each) for name in found.values())), "")
        if not prefix:
            break
        found = {other: name.removeprefix(prefix) for other, name in found.items()}
    return {other: name if name in wanted else known.get(name, name) for other, name in found.items()}


def _own_names(network: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors in the module before it was divided into extractor and head, and here."""
    if not isinstance(network, Network):
        return
    head = getattr(network, "head_name", HEAD.rstrip("."))
    for name in network.state_dict():
        part, _, rest = name.partition(".")
        yield (rest if f"{part}." == EXTRACTOR or not head else f"{head}.{rest}"), name


def _is_named(item: tuple[Any, Any]) -> bool:
    """Return whether this is a name with a tensor that holds all its numbers."""
    name, value = item
    if not (isinstance(name, str) and isinstance(value, Tensor)):
        return False
    return value.layout == torch.strided and not (value.is_meta or value.is_quantized)
