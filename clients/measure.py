"""Counting right answers, at the server and at sites."""

import torch
from torch import nn

from clients.data import Images, to_float


def pieces(number: int, most: int) -> int:
    """How many batches of about equal size, none above `most`, so many images make."""
    return max(1, -(-number // most))


def count_right(network: nn.Module, images: Images, batch: int, device: torch.device) -> int:
    """How many of the images the network (in eval mode) classifies rightly."""
    hits = torch.zeros((), dtype=torch.int64, device=device)
    parts = pieces(len(images), batch)
    with torch.inference_mode():
        for pixels, labels in zip(images.x.tensor_split(parts), images.y.tensor_split(parts), strict=True):
            guesses = network(to_float(pixels.to(device))).argmax(dim=1)
            hits += (guesses == labels.to(device)).sum()
    return int(hits)
