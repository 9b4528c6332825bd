"""What wiring finds in a network: units, their layers and groups, streams, points, what is tied to input or output."""

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from fedloom.fusion.graph.channels import WiringError, wire
from tests.fusion.wirings import Dynamic, check, groups, images, resnet


@pytest.mark.parametrize(("name", "stages"), [("resnet18", [2, 2, 2, 2]), ("resnet34", [3, 4, 6, 3])])
def test_units_of_torchvision_resnets(name, stages):
    wiring = wire(getattr(models, name)(weights=None), images(64))
    blocks = [f"layer{stage + 1}.{index}" for stage, count in enumerate(stages) for index in range(count)]
    assert [unit.name for unit in wiring.units] == ["conv1", *blocks]
    assert groups(wiring) == [1, *stages]
    assert len(wiring.axes) == 2 + 4 + sum(stages)  # input, output, four streams, one within each block
    assert wiring.units[0].layers == ("conv1", "bn1")
    first = next(unit for unit in wiring.units if unit.name == "layer2.0")
    assert first.layers[-2:] == ("layer2.0.downsample.0", "layer2.0.downsample.1")
    assert (first.node, first.shape, first.identity_skip) == ("layer2_0_conv2", (128, 8, 8), False)
    assert first.sum == f"add_{stages[0]}"
    assert all(unit.identity_skip for unit in wiring.units if unit.kind == "block" and not unit.name.endswith(".0"))


def test_points_are_what_activations_see():
    wiring = wire(models.resnet18(weights=None), images(64))
    stream = wiring.units[1].axis
    assert wiring.points[stream] == ("bn1", "add", "add_1")
    assert wiring.node_axes["layer1_0_conv2"] == stream
    assert wiring.axes[wiring.node_axes["fc"]].fixed
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    assert set(wire(network, images(4)).node_axes) == {"input_1", "_0", "_1", "_3"}


def test_shared_layers_and_mobile_blocks():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
            self.alias = self.again

        def forward(self, x: Tensor, scale: float = 2.0, plain: bool = True) -> Tensor:
            x = self.again(self.first(x).tanh()).tanh()
            return self.last(self.alias(x).tanh() * scale) if plain else x

    wiring = check(Twice(), torch.randn(3, 4))
    assert [axis.size for axis in wiring.axes] == [4, 6, 2]
    assert [unit.name for unit in wiring.units] == ["first", "again"]
    mobile = wire(models.mobilenet_v2(weights=None), images(64))
    assert mobile.units[0].layers == ("features.0.0", "features.0.1", "features.1.conv.0.0", "features.1.conv.0.1")


def test_sum_of_three_branches_is_one_block():
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b, self.norm = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(self.norm(self.a(x) + self.b(x) + x))

    stem, block = check(Three(), torch.randn(2, 5)).units
    assert (stem.name, stem.group, stem.axis) == ("stem", 0, block.axis)
    assert (block.layers, block.sum, block.group) == (("a", "b", "norm"), "add_1", 1)


def test_flags_and_buffers_stay():
    network = resnet([4, 8], 1).train()
    network[2].eval()
    example = images(8)
    flags = [module.training for module in network.modules()]
    before, sample = {name: tensor.clone() for name, tensor in network.state_dict().items()}, example.clone()
    wiring = wire(network, example)
    assert [module.training for module in network.modules()] == flags
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert torch.equal(example, sample)
    assert wiring.graph.get_submodule("0") is network[0]
    with pytest.raises(WiringError):
        wire(nn.Sequential(network, Dynamic()), example)
    assert [module.training for module in network.modules()] == flags


def test_axes_tied_to_input_or_output_are_fixed():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    wiring = check(Residual(), torch.randn(3, 4))
    assert [(axis.size, axis.fixed) for axis in wiring.axes] == [(4, True), (9, False)]
    assert [unit.name for unit in wiring.units] == ["up"]
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(wiring.axes[0].permutation(generator), torch.arange(4))
