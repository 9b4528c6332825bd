"""Torch's defaults, independent of what the calling program or a user's module has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary() -> Iterator[None]:
    """Enter a context where new tensors are float32 on the CPU and gradients are computed, whatever was set outside."""
    kind, device = torch.get_default_dtype(), torch.get_default_device()
    elsewhere = device.type != "cpu"
    torch.set_default_dtype(torch.float32)
    if elsewhere:
        torch.set_default_device("cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(kind)
        if elsewhere:
            torch.set_default_device(device)


@contextmanager
def as_usual() -> Iterator[None]:
    """As `ordinary`; afterwards, the number of threads is that before, too."""
    before = torch.get_num_threads()
    try:
        with ordinary():
            yield
    finally:
        torch.set_num_threads(before)
