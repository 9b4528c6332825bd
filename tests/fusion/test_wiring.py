"""Wiring: any allowed permutation of a hidden axis leaves the network as it was; what cannot be wired is refused by name."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision import models
from torchvision.models import vgg
from torchvision.ops import StochasticDepth

from clients.networks.base import NETWORKS
from clients.networks.plain import StandardisedConv2d
from fusion.channels import Wiring, WiringError, permuted, wire

seeds = st.integers(0, 2**31)
widths = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Many tiny operations: a second thread, if another process wants the core, makes them five times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def randomise(network: nn.Module, seed: int = 0) -> nn.Module:
    """float64, eval mode, everything random; sizes of activations stay about 1."""
    network = network.to_empty(device="cpu").double().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        with torch.no_grad():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2.0, generator=generator)
            elif tensor.is_floating_point():
                fan_in = tensor[0].numel() if tensor.dim() > 1 else 4
                tensor.normal_(0.0, (2.0 / fan_in) ** 0.5, generator=generator)
            else:
                tensor.fill_(3)
    return network


def outputs(network: nn.Module, state: dict[str, Tensor], example: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.func.functional_call(network, state, (example.clone(),), tie_weights=False)


def check(network: nn.Module, example: Tensor, seed: int = 0, singly: int | None = None) -> Wiring:
    """All hidden axes at once, and `singly` of them (all if None) one by one."""
    network, generator = randomise(network, seed), torch.Generator().manual_seed(seed + 1)
    example = example.double()
    wiring = wire(network, example[:1])
    state = dict(network.state_dict())
    expected = outputs(network, state, example)
    hidden = [axis for axis in wiring.axes if not axis.fixed]
    every = state
    for axis in hidden:
        every = permuted(every, axis, axis.permutation(generator))
    changed = [every] + [permuted(state, axis, axis.permutation(generator)) for axis in hidden[:singly]]
    for other in changed:
        torch.testing.assert_close(outputs(network, other, example), expected, rtol=1e-9, atol=1e-9)
    assert expected.abs().max() > 1e-6 or singly is None  # small networks may be dead
    return wiring


def images(size: int = 32, channels: int = 3, count: int = 2) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(7))


def groups(wiring: Wiring) -> list[int]:
    """How many units each group has."""
    return list(Counter(unit.group for unit in wiring.units).values())


def mlp(sizes: list[int], bias: bool = True, norm: type[nn.Module] | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, out in pairwise(sizes[:-1]):
        layers += [nn.Linear(wide, out, bias=bias), norm(out) if norm else nn.Identity(), nn.ReLU(inplace=True)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Dropout(), nn.Linear(sizes[-2], sizes[-1], bias=bias))


def norm2d(kind: str, width: int) -> nn.Module:
    kinds = {
        "none": nn.Identity,
        "batch": nn.BatchNorm2d,
        "group": lambda width: nn.GroupNorm(width // 2 if width % 2 == 0 else width, width),
        "one": lambda width: nn.GroupNorm(1, width),
        "instance": lambda width: nn.InstanceNorm2d(width, affine=True, track_running_stats=True),
    }
    return kinds[kind](width)


class SmallCnn(nn.Module):
    def __init__(self, sizes: list[int], bias: bool, norm: str, flat: bool) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=bias) for a, b in pairwise([2, *sizes]))
        self.norms = nn.ModuleList(norm2d(norm, width) for width in sizes)
        self.flat = flat
        self.hidden = nn.Linear(sizes[-1] * (9 if flat else 1), 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.gelu(norm(convolution(x)))
        x = F.max_pool2d(x, 2)
        x = x.view(x.size(0), -1) if self.flat else x.mean((2, 3))
        return self.head(self.hidden(x).relu())


class Block(nn.Module):
    """A basic block after or, with `ahead`, before its norms and activations."""

    def __init__(self, inputs: int, width: int, stride: int = 1, norm: str = "batch", ahead: bool = False) -> None:
        super().__init__()
        self.ahead = ahead
        self.norm1 = norm2d(norm, inputs if ahead else width)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=norm == "none")
        self.norm2 = norm2d(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=norm == "none")
        self.drop = StochasticDepth(0.5, "row")
        straight = inputs == width and stride == 1
        self.shortcut = nn.Sequential() if straight else nn.Conv2d(inputs, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.ahead:
            active = F.relu(self.norm1(x))
            y = self.conv2(torch.relu(self.norm2(self.conv1(active))))
            return self.drop(y).add_(self.shortcut(active) if len(self.shortcut._parameters) else x)
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        y += self.shortcut(x)
        return y.relu_()


def resnet(sizes: list[int], depth: int, norm: str = "batch", ahead: bool = False, channels: int = 3) -> nn.Sequential:
    """A CIFAR-type ResNet: `depth` blocks of each width, halving the resolution between widths."""
    layers: list[nn.Module] = [nn.Conv2d(channels, sizes[0], 3, 1, 1, bias=False)]
    layers += [] if ahead else [norm2d(norm, sizes[0]), nn.ReLU()]
    for index, (before, width) in enumerate(pairwise([sizes[0], *sizes])):
        first = Block(before, width, 1 + (index > 0), norm, ahead)
        layers += [first, *(Block(width, width, 1, norm, ahead) for _ in range(depth - 1))]
    layers += [norm2d(norm, sizes[-1]), nn.ReLU()] if ahead else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10))


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))))), dim=1)


def torchvision_vgg(letter: str, batch_norm: bool) -> nn.Module:
    """torchvision's, with a narrower classifier (the usual one has 120 million weights)."""
    network = vgg.VGG(vgg.make_layers(vgg.cfgs[letter], batch_norm), 10, init_weights=False)
    head = network.classifier
    head[0], head[3], head[6] = nn.Linear(512 * 49, 32), nn.Linear(32, 32), nn.Linear(32, 10)
    return network


def cifar_vgg(letter: str) -> nn.Module:
    features = vgg.make_layers(vgg.cfgs[letter])
    for module in features:
        if isinstance(module, nn.Conv2d):
            module.bias = None
    return nn.Sequential(features, nn.Flatten(), nn.Linear(512, 10, bias=False))


@given(widths, st.booleans(), st.sampled_from([None, nn.BatchNorm1d, nn.LayerNorm]), seeds)
@settings(max_examples=25, deadline=None)
def test_random_mlps(hidden, bias, norm, seed):
    wiring = check(mlp([12, *hidden, 3], bias, norm), torch.randn(4, 12), seed)
    assert len(wiring.axes) == len(hidden) + 2
    assert [axis.fixed for axis in wiring.axes] == [True, *[False] * len(hidden), True]


@given(widths, st.booleans(), st.sampled_from(["none", "batch", "group", "one", "instance"]), st.booleans(), seeds)
@settings(max_examples=25, deadline=None)
def test_random_cnns(sizes, bias, norm, flat, seed):
    wiring = check(SmallCnn(sizes, bias, norm, flat), images(6, 2), seed)
    slot = next(slot for axis in wiring.axes for slot in axis.slots if slot.tensor == "hidden.weight" and slot.dim == 1)
    assert slot.repeat == (9 if flat else 1)


kinds = st.sampled_from(["none", "batch", "group"])


@given(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3), st.integers(1, 2), kinds, st.booleans(), seeds)
@settings(max_examples=25, deadline=None)
def test_random_resnets(sizes, depth, norm, ahead, seed):
    wiring = check(resnet(sizes, depth, norm, ahead), images(8), seed)
    assert [unit.kind for unit in wiring.units] == ["layer"] + ["block"] * depth * len(sizes)


def test_lenet_ends_in_log_softmax():
    wiring = check(LeNet(), images(28, 1))
    assert [axis.size for axis in wiring.axes] == [1, 6, 16, 120, 84, 10]
    assert groups(wiring) == [1, 1, 2]
    assert wiring.points[2] == ("conv2",)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("letter", ["A", "B", "D", "E"])
def test_vggs(letter, batch_norm):
    with torch.device("meta"):
        network = torchvision_vgg(letter, batch_norm)
    wiring = check(network, images(), singly=1)
    convolutions = sum(isinstance(width, int) for width in vgg.cfgs[letter])
    assert len(wiring.units) == convolutions + 2
    assert groups(wiring) == [*VGG_GROUPS[letter], 2]


VGG_GROUPS = {"A": [1, 1, 2, 2, 2], "B": [2] * 5, "D": [2, 2, 3, 3, 3], "E": [2, 2, 4, 4, 4]}


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "wide_resnet50_2", "mobilenet_v2"])
def test_torchvision(name):
    with torch.device("meta"):
        network = getattr(models, name)(weights=None, num_classes=10)
    check(network, images(), singly=2)


def test_cifar_resnet56():
    wiring = check(resnet([16, 32, 64], 9), images(16), singly=2)
    assert groups(wiring) == [1, 9, 9, 9]
    assert sum(unit.identity_skip for unit in wiring.units) == 25


def test_pre_activation_wide_resnet():
    wiring = check(resnet([16, 32, 64], 2, ahead=True), images(16))
    assert groups(wiring) == [1, 2, 2, 2]
    stem, first, *_, before, last = wiring.units
    assert (stem.name, stem.layers) == ("0", ("0",))
    assert (first.name, first.layers) == ("1", ("1.norm1", "1.conv1", "1.norm2", "1.conv2"))
    assert before.layers == ("5.norm1", "5.conv1", "5.norm2", "5.conv2", "5.shortcut")
    assert (before.node, before.identity_skip) == ("_5_conv2", False)
    assert last.layers == ("6.norm1", "6.conv1", "6.norm2", "6.conv2", "7")  # the norm at the end has no other place
    assert last.identity_skip


@pytest.mark.parametrize("standardise", [False, True])
def test_groupnorm_vgg(standardise):
    with torch.device("meta"):
        network = NETWORKS.build({"name": "vgg11", "width": 0.25, "groups": 8, "standardise": standardise}, "n").build(
            3, 32, 10
        )
    wiring = check(network, images(), singly=3)
    assert [axis.groups for axis in wiring.axes] == [1, *[8] * 8, 1]
    assert isinstance(wiring.graph.get_submodule("extractor.0"), StandardisedConv2d) is standardise


def test_groupnorm_resnet():
    wiring = check(resnet([8, 16], 2, "group"), images(16))
    assert {axis.size: axis.groups for axis in wiring.axes if not axis.fixed} == {8: 4, 16: 8}


def test_across_groups_or_in_one_tensor_only_the_outputs_change():
    network, example = randomise(resnet([8, 16], 2, "group")), images(16).double()
    wiring, state = wire(network, example), dict(network.state_dict())
    stream = wiring.axes[wiring.units[1].axis]
    expected = outputs(network, state, example)
    across = permuted(state, stream, torch.tensor([2, 1, 0, 3, 4, 5, 6, 7]))
    assert not torch.allclose(outputs(network, across, example), expected, atol=1e-3)
    allowed = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    assert torch.allclose(outputs(network, permuted(state, stream, allowed), example), expected, atol=1e-9)
    for slot in stream.slots:
        one = permuted(state, replace(stream, slots=(slot,)), allowed)
        assert not torch.allclose(outputs(network, one, example), expected, atol=1e-6), slot


def test_mlp_of_five_hidden_layers():
    wiring = check(mlp([8, 7, 6, 5, 4, 3, 2]), torch.randn(3, 8))
    assert [axis.size for axis in wiring.axes] == [8, 7, 6, 5, 4, 3, 2]
    assert [(unit.kind, unit.group, unit.axis, unit.shape) for unit in wiring.units] == [
        ("layer", 0, index, (8 - index,)) for index in range(1, 6)
    ]
    assert [(layer.inputs, layer.outputs) for layer in wiring.layers] == [(index, index + 1) for index in range(6)]


@pytest.mark.parametrize(("letter", "count"), [("A", 8), ("B", 10)])
def test_cifar_vgg(letter, count):
    with torch.device("meta"):
        network = cifar_vgg(letter)
    wiring = check(network, images(), singly=1)
    assert (len(wiring.axes), len(wiring.layers), len(wiring.units)) == (count + 2, count + 1, count)
    assert groups(wiring) == VGG_GROUPS[letter]
    assert wiring.units[0].node == "_0_0" and wiring.units[0].shape == (64, 32, 32)


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


class Merging(nn.Module):
    """Two convolutions and what `merge` makes of them."""

    def __init__(self, merge) -> None:
        super().__init__()
        self.a, self.b, self.merge = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), merge
        self.extra = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.a(x), self.b(x), self.extra)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.attention(x, x, x)[0]


class Dynamic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


MERGES = {
    "cat": lambda a, b, _: torch.cat([a, b], 1),
    "mul": lambda a, b, _: a * b,
    "einsum": lambda a, b, _: torch.einsum("nchw,ndhw->ncd", a, b),
    "matmul": lambda a, b, _: a @ b,
    "several outputs": lambda a, b, _: (a, b),
    "splits or joins": lambda a, b, _: (a + b).view(a.size(0), 2, -1),
    "batch": lambda a, b, _: (a + b).flatten(),
    "unbind": lambda a, b, _: (a + b).unbind(1)[0],
    "reaches channels": lambda a, b, _: F.pad(a + b, (0, 0, 0, 0, 0, 2)),
    "over": lambda a, b, _: (a + b).mean(1, keepdim=True),
    "index": lambda a, b, _: (a + b)[:, :2],
}


@pytest.mark.parametrize("reason", MERGES)
def test_operations_that_mix_channels_are_refused_by_name(reason):
    with pytest.raises(WiringError, match=reason) as caught:
        wire(Merging(MERGES[reason]), images(4))
    assert re.search(r"node '\w+'", str(caught.value))
    assert "test_wiring.py:" in str(caught.value) or reason == "several outputs"


def test_harmless_operations_are_not_refused():
    merge = lambda a, b, scale: F.pad((a * scale - b / 2)[:, :, ::2], (1, 1)).clamp(min=0).unsqueeze(-1).squeeze(-1)  # noqa: E731
    check(
        nn.Sequential(Merging(merge), nn.PReLU(4), nn.Flatten(2), nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 2)),
        images(4),
    )


@pytest.mark.parametrize(
    ("network", "example", "message"),
    [
        (Attention(), torch.randn(2, 3), "node 'attention' .*MultiheadAttention"),
        (models.squeezenet1_1(weights=None), images(64), "node 'cat' of module 'features.3' .*squeezenet.py:"),
        (models.resnext50_32x4d(weights=None), images(64), "'layer1.0.conv2' .*grouped convolution"),
        (nn.Sequential(nn.Identity(), Dynamic()), images(8), r"module '1' .*test_wiring.py:\d+.* control flow"),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 2)), images(8), "'0'.*ConvTranspose2d"),
        (nn.Sequential(nn.Conv2d(3, 6, 1, groups=3)), images(8), "'0'.*grouped convolution"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(8, 2)), images(8), "'1'.*linear layer"),
        (nn.Sequential(nn.Conv2d(4, 4, 1)), images(8), "'0'.*does not run"),
        (nn.Sequential(nn.Linear(3, 4)), torch.randn(3), r"example of \[3\]"),
        (
            nn.Sequential(nn.Conv2d(3, 12, 1), nn.GroupNorm(2, 12), nn.GroupNorm(3, 12), nn.Conv2d(12, 2, 1)),
            images(8),
            "'2'.*group",
        ),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.LocalResponseNorm(2)), images(8), "'1'.*LocalResponseNorm"),
        (nn.Sequential(nn.Linear(3, 4), nn.Softmax(1), nn.Linear(4, 2)), torch.randn(2, 3), "'1'.*softmax"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:12],
)
def test_what_cannot_be_wired(network, example, message):
    with pytest.raises(WiringError, match=message):
        wire(network, example)


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


def test_unused_parameters_are_refused():
    network = nn.Sequential(nn.Linear(3, 2))
    network.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    with pytest.raises(WiringError, match="'spare'"):
        wire(network, torch.randn(2, 3))


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
