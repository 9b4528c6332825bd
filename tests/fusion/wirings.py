"""Parts of the tests of wiring: networks as others write them, and the check that permutations leave a network as it was."""

from collections import Counter
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import vgg
from torchvision.ops import StochasticDepth

from fedloom.fusion.graph.channels import Wiring, permuted, wire


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
    every = wiring.permuted(state, wiring.permutations(generator))
    alone = [axis for axis in hidden if all(other.parent != axis.index for other in hidden)][:singly]
    changed = [every] + [permuted(state, axis, axis.permutation(generator)) for axis in alone]
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


class Merging(nn.Module):
    """Two convolutions and what `merge` makes of them."""

    def __init__(self, merge) -> None:
        super().__init__()
        self.a, self.b, self.merge = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), merge
        self.extra = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(self.a(x), self.b(x), self.extra)


class Dynamic(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x
