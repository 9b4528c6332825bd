"""Torch as this project takes it to be, whatever a program around it, or a module of the user's, has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary() -> Iterator[None]:
    """Within, new tensors are float32 on the CPU, and gradients are taken; afterwards all is as it was."""
    kind, device = torch.get_default_dtype(), torch.get_default_device()
    other = device.type != "cpu"
    torch.set_default_dtype(torch.float32)
    if other:
        torch.set_default_device("cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(kind)
        if other:
            torch.set_default_device(device)
