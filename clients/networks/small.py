"""Small networks: fully connected layers only, and a network like LeNet-5."""

from dataclasses import dataclass

from torch import nn

from fedloom.clients.data.form import ARRAY, FEATURES, IMAGE, SEQUENCE, Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, check_inputs
from fedloom.clients.networks.layers import HEAD_HELP, WIDTH_HELP, check_image, scaled
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option


def hidden(inputs: int, widths: list[int], bias: bool) -> list[nn.Module]:
    """Return linear layers with a ReLU after each: [n, inputs] to [n, widths[-1]]."""
    layers: list[nn.Module] = []
    for out in widths:
        layers += [nn.Linear(inputs, out, bias=bias), nn.ReLU(inplace=True)]
        inputs = out
    return layers


@NETWORKS.register("mlp")
@dataclass(frozen=True)
class Mlp(NetworkSpec):
    """Inputs flattened, hidden linear layers with ReLU, a linear head."""

    widths: list[int] = option([400, 200, 100], "widths of the hidden layers; empty: only the head", low=1)
    bias: bool = option(True, "hidden layers with a bias")
    head_bias: bool = option(True, HEAD_HELP)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for tokens."""
        check_inputs(form, "mlp", IMAGE, FEATURES, SEQUENCE, ARRAY)
        if form.each_step:
            raise UserError("network 'mlp': returns outputs once for an example, not for each step; use lstm or transformer")
        inputs = form.numbers
        head = nn.Linear([inputs, *self.widths][-1], form.outputs, bias=self.head_bias)
        return Network(nn.Sequential(nn.Flatten(), *hidden(inputs, self.widths, self.bias)), head)


@NETWORKS.register("lenet")
@dataclass(frozen=True)
class Lenet(NetworkSpec):
    """Like LeNet-5: 5x5 convolutions 6-16, a 2x2 max-pooling after each, hidden layers 120-84, ReLU, linear head."""

    width: float = option(1.0, WIDTH_HELP, low=0.01, high=64.0)
    bias: bool = option(True, "convolutions and hidden layers with a bias")
    head_bias: bool = option(True, HEAD_HELP)

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for images smaller than 16 x 16 pixels."""
        check_image(form, self, least=16)
        first, second, third, fourth = (scaled(step, self.width) for step in (6, 16, 120, 84))
        height, width = (((side - 4) // 2 - 4) // 2 for side in (form.height, form.width))
        extractor = nn.Sequential(
            *(nn.Conv2d(form.channels, first, 5, bias=self.bias), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 5, bias=self.bias), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            nn.Flatten(),
            *hidden(second * height * width, [third, fourth], self.bias),
        )
        return Network(extractor, nn.Linear(fourth, form.outputs, bias=self.head_bias))
