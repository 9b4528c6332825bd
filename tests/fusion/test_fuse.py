"""Whole fusions: what must stay the function it was, which widths and layers come out, what is refused and how."""

import gc
import re
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.results import Fused
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import AVERAGED, PLAIN, apart, images, name_of, network, outputs, randomised

PROBE, TEST = images(8), images(6, seed=1)


def shapes(built: nn.Module) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in built.state_dict().items()}


def states_equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def deep_and_shallow(family: str) -> tuple[str, str]:
    if family == "mlp":
        return "mlp:widths=[14,12,10,9]", "mlp:widths=[8,6]"
    deep, shallow = {"vgg": ("vgg13", "vgg11"), "resnet": ("resnet34", "resnet18")}[family.partition(":")[0]]
    options = "groups=4," + family.partition(":")[2]
    return f"{deep}:width=0.25,{options}", f"{shallow}:width=0.125,{options}"


FAMILIES = ["mlp", "vgg:norm=none,bias=true", "vgg:norm=batch", "vgg:norm=group", "resnet:norm=none,bias=true",
            "resnet:norm=batch", "resnet:norm=group"]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("into", [0, 1])
def test_unequal_depths_and_widths(family, into):
    texts = deep_and_shallow(family)
    networks = [network(text, seed) for seed, text in enumerate(texts)]
    fused = fuse(networks, into=into, depth=0, probe=PROBE, settings=AVERAGED)
    assert shapes(fused.network).keys() == shapes(networks[0]).keys()
    if into == 0:
        assert shapes(fused.network) == shapes(networks[0])
    elif family != "mlp":
        as_deep = texts[0].replace("width=0.25", "width=0.125")
        own, slim = shapes(networks[1]), shapes(name_of(as_deep).build())
        assert shapes(fused.network)["head.weight"] == own["head.weight"]
        assert "resnet" in family or shapes(fused.network) == slim
    assert fused.network.training is networks[0].training
    assert torch.isfinite(outputs(fused.network, TEST)).all()
    assert [len(made.state_dict()) for made in fused.aligned] == [len(made.state_dict()) for made in fused.balanced]
    assert fused.plans[into] == {} and fused.costs[into] == {}


@pytest.mark.parametrize("family", ["mlp", "resnet:norm=none,bias=true", "resnet:norm=batch", "resnet:norm=group"])
@pytest.mark.parametrize("into", [0, 1])
def test_layers_merged_or_removed(family, into):
    networks = [network(text, seed) for seed, text in enumerate(deep_and_shallow(family))]
    fused = fuse(networks, into=into, depth=1, probe=PROBE, settings=AVERAGED)
    assert shapes(fused.network).keys() == shapes(networks[1]).keys()
    assert torch.isfinite(outputs(fused.network, TEST)).all()
    if into == 1:
        assert shapes(fused.network) == shapes(networks[1])


@pytest.mark.parametrize(
    "texts",
    [
        ["mlp:widths=[14,12,10,9]", "mlp:widths=[8,6]", "mlp:widths=[10,9,8]"],
        ["vgg13:width=0.25,norm=batch", "vgg11:width=0.125,norm=batch", "vgg16:width=0.125,norm=batch"],
        ["resnet34:width=0.125", "resnet18:width=0.0625", "resnet18:width=0.25"],
    ],
)
@pytest.mark.parametrize(("into", "depth"), [(1, 0), (2, 2), (0, 2), (0, 0)])
def test_three_networks(texts, into, depth):
    networks = [network(text, seed) for seed, text in enumerate(texts)]
    units = [len(wire(built, PROBE[:1]).units) for built in networks]
    if "vgg" in texts[0] and units[depth] < max(units):
        with pytest.raises(UserError, match="cannot be merged"):
            fuse(networks, into=into, depth=depth, probe=PROBE, settings=AVERAGED)
        return
    fused = fuse(networks, into=into, depth=depth, probe=PROBE, weights=[1, 2, 1], settings=AVERAGED)
    assert shapes(fused.network).keys() == shapes(networks[depth]).keys()
    if into == depth:
        assert shapes(fused.network) == shapes(networks[into])
    assert shapes(fused.network)["head.weight"] == shapes(networks[into])["head.weight"]
    assert [len(alignment) for alignment in fused.alignment] == [min(unit, units[depth]) for unit in units]
    assert torch.isfinite(outputs(fused.network, TEST)).all()
    whole = shapes(fused.network)
    for own in map(shapes, fused.aligned):
        assert all(own[name] == whole[name] for name in own.keys() & whole.keys())


SAME = ["mlp:widths=[12,9,7]", "vgg11:width=0.125,norm=none", "vgg13:width=0.125,norm=batch", "vgg11:width=0.25,groups=4",
        "resnet18:width=0.125,norm=none", "resnet18:width=0.125,norm=batch", "resnet20:norm=group,groups=4",
        "wide_resnet:depth=10,widen=1,norm=batch"]  # fmt: skip


@pytest.mark.parametrize("text", SAME)
@pytest.mark.parametrize("basis", ["activations", "weights"])
def test_another_basis_leaves_the_logits_and_moves_neither_end(text, basis):
    networks = [network(text, seed) for seed in (0, 1)]
    fused = fuse(networks, into=1, probe=PROBE, settings=replace(PLAIN, basis=basis))
    assert apart(fused.aligned[0], networks[0], TEST) < 1e-6
    assert states_equal(fused.aligned[1], networks[1])
    moved, own = fused.aligned[0].state_dict(), networks[0].state_dict()
    assert torch.equal(moved["head.bias"], own["head.bias"])
    assert "head" not in fused.plans[0]
    order = next(iter(fused.plans[0].values())).argmax(dim=0)
    first = next(name for name, tensor in own.items() if tensor.ndim > 1)
    torch.testing.assert_close(moved[first], own[first][order])
    assert not torch.equal(order, torch.arange(len(order)))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weight_on_one_network_gives_its_function(family):
    deep, _ = deep_and_shallow(family)
    networks = [network(deep, seed) for seed in (0, 1)]
    for place, weights in enumerate(([1, 0], [0.0, 0.5])):
        fused = fuse(networks, into=1, probe=PROBE, weights=weights, settings=PLAIN)
        assert apart(fused.network, networks[place], TEST) < 1e-6


@pytest.mark.parametrize("family", ["mlp", "vgg:norm=batch", "resnet:norm=none,bias=true", "resnet:norm=batch"])
def test_added_layers_are_kept_or_averaged(family):
    deep, shallow = deep_and_shallow(family)
    networks = [network(deep), network(shallow.replace("width=0.125", "width=0.25"), 1)]
    kept, mixed = (fuse(networks, into=0, probe=PROBE, settings=replace(PLAIN, keep_added=keep)) for keep in (True, False))
    added = 0
    for name, ours in networks[0].state_dict().items():
        theirs = kept.aligned[1].state_dict()[name]
        half = (0.5 * ours + 0.5 * theirs).to(ours.dtype)
        whole = torch.equal(kept.network.state_dict()[name], ours)
        if not whole and ours.is_floating_point():
            torch.testing.assert_close(kept.network.state_dict()[name], half)
        if ours.is_floating_point():
            torch.testing.assert_close(mixed.network.state_dict()[name], half)
        added += whole
    assert added > 0
    none_of_it = fuse(networks, into=0, probe=PROBE, weights=[0, 1], settings=replace(PLAIN, keep_added=False))
    if family != "mlp":  # its widths are not equal
        assert apart(none_of_it.network, networks[1], TEST) < 1e-5


def test_gradients_flow_and_an_ordinary_network_takes_the_state():
    texts = deep_and_shallow("resnet:norm=batch")
    fused = fuse([network(text, seed) for seed, text in enumerate(texts)], into=0, probe=PROBE, settings=AVERAGED)
    ordinary = name_of(texts[0]).build().double().eval()
    ordinary.load_state_dict(fused.network.state_dict())
    assert apart(ordinary, fused.network, TEST) == 0.0
    fused.network.train()(TEST).logsumexp(dim=1).sum().backward()
    for name, parameter in fused.network.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    step = torch.optim.SGD(fused.network.parameters(), lr=0.1)
    before = fused.network.get_parameter("head.weight").clone()
    step.step()
    assert not torch.equal(before, fused.network.get_parameter("head.weight"))


def torchvision(name: str, seed: int) -> nn.Module:
    return network(f"torchvision:{name}", seed).float()


@pytest.mark.parametrize(("one", "other"), [("resnet18", "resnet34"), ("mobilenet_v2", "mobilenet_v2")])
def test_torchvisions_networks(one, other):
    networks, probe, test = [torchvision(one, 0), torchvision(other, 1)], PROBE.float(), TEST.float()
    fused = fuse(networks, into=1, probe=probe, settings=AVERAGED)
    assert shapes(fused.network) == shapes(networks[1])
    assert apart(fused.aligned[0], networks[0], test) < 1e-4
    assert torch.isfinite(outputs(fused.network, test)).all()
    assert {tensor.dtype for tensor in fused.network.parameters()} == {torch.float32}


class Classified(nn.Module):
    """Convolutions with BatchNorm, a pooling between, then linear layers behind a flatten, as torchvision's VGGs have."""

    def __init__(self, sizes: list[int], linear: int) -> None:
        super().__init__()
        layers, before = [], 3
        for size in sizes:
            layers += [nn.Conv2d(before, size, 3, padding=1), nn.BatchNorm2d(size), nn.ReLU(inplace=True)]
            before = size
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2))
        self.avgpool = nn.AdaptiveAvgPool2d((3, 3))
        self.classifier = nn.Sequential(nn.Linear(before * 9, linear), nn.ReLU(), nn.Dropout(), nn.Linear(linear, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def test_a_linear_layer_behind_a_flatten():
    deep, shallow = randomised(Classified([8, 8, 6], 9)), randomised(Classified([8, 6], 9), 1)
    fused = fuse([shallow, deep], into=1, probe=PROBE, settings=PLAIN)
    assert shapes(fused.network) == shapes(deep)
    assert apart(fused.aligned[0], shallow, TEST) < 1e-6
    slim = fuse([deep, randomised(Classified([4, 3], 5), 2)], into=1, depth=0, probe=PROBE, settings=AVERAGED)
    assert shapes(slim.network)["classifier.0.weight"] == [5, 27]


def test_a_map_that_is_given():
    deep, shallow = network("mlp:widths=[9,8,7,6]"), network("mlp:widths=[8,6]", 1)
    for networks, own in (([deep, shallow], 0), ([shallow, deep], 1)):
        for depth in (0, 1):
            fused = fuse(networks, into=0, depth=depth, probe=PROBE, settings=FusionSettings(map=(1, 3), refit="none"))
            assert fused.alignment[1 - depth] == (1, 3)
            assert fused.alignment[depth] == tuple(range(4 if depth == own else 2))


@pytest.mark.parametrize("chosen", [(0,), (0, 1, 2), (1, 1), (2, 1), (0, 4), (-1, 2), ()])
def test_maps_that_cannot_be(chosen):
    networks = [network("mlp:widths=[9,8,7,6]"), network("mlp:widths=[8,6]", 1)]
    with pytest.raises(UserError, match=r"fuse: map .* use, for two networks, 2 rising indices below 4"):
        fuse(networks, into=0, probe=PROBE, settings=FusionSettings(map=chosen))


def test_the_same_call_gives_the_same_network():
    networks = [network(text, seed) for seed, text in enumerate(deep_and_shallow("resnet:norm=batch"))]
    before = [{name: tensor.clone() for name, tensor in built.state_dict().items()} for built in networks]

    def made() -> Fused:
        return fuse(networks, into=0, probe=PROBE, settings=AVERAGED)

    assert states_equal(made().network, made().network)
    for tensor in made().network.state_dict().values():
        tensor.zero_()
    for built, state in zip(networks, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in built.state_dict().items())


def test_a_result_is_one_line():
    networks = [network(text, seed) for seed, text in enumerate(deep_and_shallow("resnet:norm=batch"))]
    text = repr(fuse(networks, into=0, probe=PROBE, settings=AVERAGED))
    assert re.fullmatch(r"Fused\(\w+, [\d,]+ parameters(, agreement [01]\.\d\d)?, \d+ notes\)", text)


def test_settings_that_cannot_be():
    wrong: dict[str, Any] = {"comparison": "cca", "relu": "max", "basis": "gradients", "positions": -1}
    for name, given in wrong.items():
        with pytest.raises(UserError, match=f"fusion {name}: got '?{given}'?, takes"):
            FusionSettings(**{name: given})


def test_a_fusion_leaves_nothing_in_memory():
    pair = [network(f"resnet{depth}:width=0.125,norm=batch") for depth in (26, 18)]
    fused = fuse(pair, into=1, depth=0, probe=images(8))
    made = [weakref.ref(module) for one in (fused.balanced[1], fused.network) for module in one.modules()]
    del fused
    gc.collect()
    assert not any(module() is not None for module in made)
