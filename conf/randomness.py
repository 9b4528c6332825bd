"""Create random generators that depend only on the seed and on words that name their purpose."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator

import numpy as np
import torch

CPU = torch.device("cpu")
GLOBAL = threading.RLock()  # global generators belong to the process: only the thread that holds this may seed them


def generator(seed: int, *words: str | int) -> np.random.Generator:
    """Return a NumPy generator seeded with (seed, words). It is the same in every process and on every machine.

    Other words, or another order, give an independent stream.
    """
    return np.random.default_rng(int.from_bytes(_digest(seed, words)))


def torch_generator(seed: int, *words: str | int) -> torch.Generator:
    """Return a torch CPU generator seeded with (seed, words), with the properties of `generator`."""
    return torch.Generator().manual_seed(int.from_bytes(_digest(seed, words)[:8]))


@contextlib.contextmanager
def drawing(seed: int = 0, device: torch.device = CPU) -> Iterator[None]:
    """Seed torch's global generators (for Dropout and similar layers) inside the context, and restore them after it.

    Other threads wait for the end of the context before they enter one.
    """
    with GLOBAL, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


def drawn(device: torch.device) -> list[bytes]:
    """Return the states of torch's global generators (CPU, and `device` if CUDA). Each draw changes a state."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [bytes(state.numpy()) for state in states]


def _digest(seed: int, words: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256(json.dumps([seed, *words]).encode()).digest()
