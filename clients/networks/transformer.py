"""A small transformer for sequences and tokens (Vaswani et al. 2017), with norms before each part (Xiong et al. 2020)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data.form import TOKENS, Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec
from fedloom.clients.networks.layers import HEAD_HELP
from fedloom.clients.networks.steps import check_steps, entry, mean_of_steps, real_steps
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option

FAR = -1e9  # a score whose share is exactly 0


class Attention(nn.Module):
    """Self-attention over [n, t, width]. `mask`: added to the scores of steps [t] that each step [t] reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        parts = self.inputs(states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]  # [n, heads, t, width / heads]
        scores = (query * query.size(-1) ** -0.5).matmul(key.transpose(-2, -1))  # vmap has no rule for torch's attention
        shares = F.softmax(scores if mask is None else scores + mask, dim=-1)
        return self.outputs(shares.matmul(value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward part, each after a LayerNorm and with a shortcut around it: [n, t, width] to the same."""

    def __init__(self, width: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, feed_forward), nn.ReLU(), nn.Linear(feed_forward, width))

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        states = states + self.attention(self.norm1(states), mask)
        return states + self.feed(self.norm2(states))


class Encoder(nn.Module):
    """Inputs to features [n, width], the mean over real steps; or (each_step) to [n, t, width]."""

    def __init__(self, spec: "Transformer", form: Form) -> None:
        super().__init__()
        self.tokens, self.each_step, self.length = form.kind == TOKENS, form.each_step, form.length
        self.entry = entry(form, spec.width)
        self.positions = nn.Embedding(form.length, spec.width)
        layers = [Block(spec.width, spec.heads, spec.feed_forward) for _ in range(spec.layers)]
        self.blocks, self.norm = nn.ModuleList(layers), nn.LayerNorm(spec.width)

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.entry(inputs) + self.positions(torch.arange(self.length, device=inputs.device))
        real, mask = None, None
        if self.each_step:
            mask = torch.full((self.length, self.length), FAR, dtype=states.dtype, device=states.device).triu(1)
        elif self.tokens:
            real = real_steps(inputs).to(states.dtype)
            mask = ((1.0 - real) * FAR).unsqueeze(1).unsqueeze(1)
        for block in self.blocks:
            states = block(states, mask)
        states = self.norm(states)
        return states if self.each_step else mean_of_steps(states, real)


@NETWORKS.register("transformer")
@dataclass(frozen=True)
class Transformer(NetworkSpec):
    """A transformer without dropout, for sequences and tokens. If the data have a target at each step, it is causal."""

    width: int = option(64, "width of the states", low=1)
    heads: int = option(4, "attention heads; divides the width", low=1)
    layers: int = option(2, "number of blocks", low=1)
    feed_forward: int = option(128, "hidden width of each feed-forward part", low=1)
    head_bias: bool = option(True, HEAD_HELP)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for other inputs, or heads that do not divide the width."""
        check_steps(form, "transformer")
        if self.width % self.heads:
            raise UserError(f"network.heads: got {self.heads}, takes a number that divides network.width, {self.width}")
        return Network(Encoder(self, form), nn.Linear(self.width, form.outputs, bias=self.head_bias))
