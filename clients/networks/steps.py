"""Parts of networks for sequences and tokens: the first layer, the real steps, and the mean over them.

Steps with the token PADDING fill a text up to its length. They change no output of the network.
"""

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import PADDING, SEQUENCE, TOKENS, Form
from fedloom.clients.networks.base import check_inputs
from fedloom.conf.errors import UserError

FEWEST = 2  # different tokens, with PADDING


def check_steps(form: Form, name: str) -> None:
    """Raise UserError unless the inputs are sequences or tokens."""
    check_inputs(form, name, SEQUENCE, TOKENS)
    if form.kind == TOKENS and form.vocabulary < FEWEST:
        raise UserError(f"network '{name}': the vocabulary has {form.vocabulary} tokens, takes at least {FEWEST}")


def entry(form: Form, width: int) -> nn.Module:
    """Return the first layer: [n, t, f] or tokens [n, t] to [n, t, width]."""
    return nn.Embedding(form.vocabulary, width) if form.kind == TOKENS else nn.Linear(form.features, width)


def real_steps(tokens: Tensor) -> Tensor:
    """Return 1.0 for each step that is not PADDING, [n, t]."""
    return (tokens != PADDING).float()


def mean_of_steps(states: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean over the real steps: [n, t, c] to [n, c]; 0 without any. `real`: [n, t]; None: all."""
    if real is None:
        return states.mean(1)
    real = real.unsqueeze(-1)
    return (states * real).sum(1) / real.sum(1).clamp(min=1.0)


def last_step(states: Tensor, real: Tensor | None) -> Tensor:
    """Return the state of the last real step: [n, t, c] to [n, c]; of the first step without any."""
    if real is None:
        return states[:, -1]
    numbers = torch.arange(real.shape[1], device=real.device)
    last = (real * numbers).argmax(1)
    return (states * (numbers == last.unsqueeze(-1)).unsqueeze(-1).to(states.dtype)).sum(1)
