"""Networks for sequences and tokens: an LSTM, and a chain of one-dimensional convolutions."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data.form import TOKENS, Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec
from fedloom.clients.networks.layers import HEAD_HELP
from fedloom.clients.networks.steps import check_steps, entry, last_step, mean_of_steps, real_steps
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option


class Recurrent(nn.Module):
    """Inputs to the LSTM's state at the last real step, [n, width]; or (each_step) at each step, [n, t, width]."""

    def __init__(self, spec: "Lstm", form: Form) -> None:
        super().__init__()
        self.tokens, self.each_step = form.kind == TOKENS, form.each_step
        self.entry = entry(form, spec.width) if self.tokens else nn.Identity()
        self.lstm = nn.LSTM(spec.width if self.tokens else form.features, spec.width, spec.layers, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.lstm(self.entry(inputs))[0]
        if self.each_step:
            return states
        return last_step(states, real_steps(inputs) if self.tokens else None)


@NETWORKS.register("lstm")
@dataclass(frozen=True)
class Lstm(NetworkSpec):
    """An LSTM (Hochreiter and Schmidhuber 1997) for sequences and tokens, a linear head on the last real step."""

    width: int = option(64, "width of the states, and of the tokens' vectors", low=1)
    layers: int = option(1, "number of LSTM layers", low=1)
    head_bias: bool = option(True, HEAD_HELP)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for other inputs."""
        check_steps(form, "lstm")
        return Network(Recurrent(self, form), nn.Linear(self.width, form.outputs, bias=self.head_bias))


class Convolutions(nn.Module):
    """Inputs to features [n, widths[-1]]: convolutions over the steps, ReLU after each, the mean over real steps."""

    def __init__(self, spec: "Cnn1d", form: Form) -> None:
        super().__init__()
        self.tokens = form.kind == TOKENS
        self.entry = entry(form, spec.widths[0]) if self.tokens else nn.Identity()
        layers, inputs = list[nn.Module](), spec.widths[0] if self.tokens else form.features
        for out in spec.widths:
            layers.append(nn.Conv1d(inputs, out, spec.kernel, padding=spec.kernel // 2))
            inputs = out
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        states, real = self.entry(inputs).transpose(1, 2), None
        if self.tokens:  # behind the last real step, as behind the end of a sequence, all values are 0
            real = real_steps(inputs).to(states.dtype)
            states = states * real.unsqueeze(1)
        for layer in self.layers:
            states = F.relu(layer(states))
            states = states if real is None else states * real.unsqueeze(1)
        return mean_of_steps(states.transpose(1, 2), real)


@NETWORKS.register("cnn1d")
@dataclass(frozen=True)
class Cnn1d(NetworkSpec):
    """Convolutions over the steps of sequences and tokens, ReLU after each; then a global average and a linear head."""

    widths: list[int] = option([64, 64, 128], "output channels of the convolutions", low=1)
    kernel: int = option(5, "steps that each convolution reads: an odd number", low=1)
    head_bias: bool = option(True, HEAD_HELP)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for other inputs, targets at each step, or an even kernel."""
        check_steps(form, "cnn1d")
        if form.each_step:
            raise UserError(
                "network 'cnn1d': returns outputs once for an example, not for each step; use lstm or transformer"
            )
        if not self.widths or self.kernel % 2 == 0:
            fault = (
                f"kernel: got {self.kernel}, takes an odd number" if self.widths else "widths: got none, takes at least one"
            )
            raise UserError(f"network.{fault}")
        return Network(Convolutions(self, form), nn.Linear(self.widths[-1], form.outputs, bias=self.head_bias))
