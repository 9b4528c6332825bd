"""Torch in this process: the device, and defaults that do not depend on what the calling program has set."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from fedloom.conf.errors import UserError
from fedloom.conf.machine import threads
from fedloom.conf.schema import EngineConfig

_LOCK = threading.Lock()
_BEFORE: list[list[torch.dtype]] = []  # for each thread inside `ordinary`: the default type to restore, in order of entry


def pick_device(name: str, share: float = 1.0) -> torch.device:
    """Return the device that `name` (engine.device) stands for. `auto` takes a GPU if this process sees one.

    `share`: the largest share of the GPU's memory for this process. Raises UserError for `cuda` without a GPU.
    """
    seen = torch.cuda.is_available()
    if name == "cuda" and not seen:
        raise UserError("engine.device: got cuda, but this worker sees no GPU; set engine.num_gpus, or engine.device=auto")
    if share < 1.0 and seen and name != "cpu":
        torch.cuda.set_per_process_memory_fraction(share)
    return torch.device("cuda" if seen and name != "cpu" else "cpu")


def memory_share(engine: EngineConfig) -> float:
    """Return the share of a GPU's memory for a simulated site: its worker's share of the GPU."""
    return engine.num_gpus if engine.name == "ray" and 0.0 < engine.num_gpus < 1.0 else 1.0


@contextmanager
def ordinary() -> Iterator[None]:
    """Enter a context where new tensors are float32 on the CPU and gradients are computed, whatever was set outside."""
    elsewhere = torch.get_default_device().type != "cpu"  # on the CPU, a context would only cost time at each operation
    cpu = torch.device("cpu") if elsewhere else nullcontext()
    with _float32(), cpu, torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def _float32() -> Iterator[None]:
    """Make float32 the default type, which belongs to the process; the last thread to leave restores it."""
    with _LOCK:
        before = [torch.get_default_dtype()]
        _BEFORE.append(before)
        torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _LOCK:
            index = next(index for index, entry in enumerate(_BEFORE) if entry is before)
            if index + 1 < len(_BEFORE):
                _BEFORE[index + 1][0] = before[0]
            else:
                torch.set_default_dtype(before[0])
            del _BEFORE[index]


@contextmanager
def as_usual() -> Iterator[None]:
    """As `ordinary`; afterwards, the number of threads is that before, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads(before))
    try:
        with ordinary():
            yield
    finally:
        torch.set_num_threads(before)
