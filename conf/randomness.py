"""Random generators that depend on nothing but their names: the seed and words that say what they are for."""

import contextlib
import hashlib
import json
from collections.abc import Iterator

import numpy as np
import torch


def generator(seed: int, *words: str | int) -> np.random.Generator:
    """NumPy's generator for (seed, words): the same in every process and on every machine.

    Other words, or the same in another order, give an independent stream.
    """
    return np.random.default_rng(int.from_bytes(_digest(seed, words)))


def torch_generator(seed: int, *words: str | int) -> torch.Generator:
    """Torch's CPU generator for (seed, words), as `generator` is NumPy's."""
    return torch.Generator().manual_seed(int.from_bytes(_digest(seed, words)[:8]))


@contextlib.contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Let what a network draws itself, such as Dropout, follow from a seed; torch's own generators are put back after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


def drawn(device: torch.device) -> list[bytes]:
    """How far torch's own generators are: other bytes after a draw."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return [bytes(one.numpy()) for one in states]


def _digest(seed: int, words: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256(json.dumps([seed, *words]).encode()).digest()
