"""Networks of other depths: what is added or was nothing changes no output; merging linear layers by hand."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import fuse
from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.balance import Balanced, balanced, relu_signs
from fedloom.fusion.graph.channels import Wiring, wire
from fedloom.fusion.probe import features_of, observe
from tests.fusion.parts import apart, images, matches, network, outputs, randomised

METHODS = ("sum", "majority", "average")


def deepened(target: nn.Module, shallow: nn.Module, probe: Tensor, inner: str = "own") -> Balanced:
    structure, wiring = wire(target, probe[:1]), wire(shallow, probe[:1])
    return balanced(target, structure, shallow, wiring, matches(structure, wiring, probe), inner=inner)


def flattened(target: nn.Module, deep: nn.Module, probe: Tensor, chosen: tuple[int, ...], method: str = "sum") -> Balanced:
    """`deep` with the layers of `target`; chosen: the layer of `deep` for each of them."""
    structure, wiring = wire(target, probe[:1]), wire(deep, probe[:1])
    nodes = {unit.node for place, unit in enumerate(wiring.units) if place not in chosen}
    seen = observe(wiring, probe, features=nodes)
    signs = relu_signs({node: features_of(seen, node) for node in nodes}, method)
    return balanced(target, structure, deep, wiring, dict(enumerate(chosen)), signs)


def mlp(*sizes: int, bias: bool = True, seed: int = 0) -> nn.Module:
    layers = [part for a, b in pairwise(sizes[:-1]) for part in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    return randomised(nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1], bias=bias)), seed)


def places(wiring: Wiring, pattern: str) -> tuple[int, ...]:
    return tuple(place for place, unit in enumerate(wiring.units) if re.search(pattern, unit.name))


def names(target: nn.Module, made: nn.Module) -> bool:
    return target.state_dict().keys() == made.state_dict().keys()


PAIRS = [
    ("mlp:widths=[9,7,6,5]", "mlp:widths=[8,6]"),
    ("mlp:widths=[9,7,6,5],bias=false", "mlp:widths=[8,6],bias=false"),
    ("vgg13:width=0.0625,norm=none", "vgg11:width=0.125,norm=none"),
    ("vgg13:width=0.0625,norm=none,bias=true", "vgg11:width=0.125,norm=none,bias=true"),
    ("vgg13:width=0.125,norm=batch", "vgg11:width=0.0625,norm=batch"),
    ("vgg13:width=0.125,norm=batch,affine=false", "vgg11:width=0.0625,norm=batch,affine=false"),
    ("resnet34:width=0.0625,norm=none", "resnet18:width=0.125,norm=none"),
    ("resnet34:width=0.0625,norm=none,bias=true", "resnet18:width=0.125,norm=none,bias=true"),
    ("resnet34:width=0.125,norm=batch", "resnet18:width=0.0625,norm=batch"),
    ("resnet34:width=0.125,norm=group,groups=4", "resnet18:width=0.0625,norm=group,groups=4"),
    ("wide_resnet:depth=22,widen=3,norm=batch,width=0.5", "wide_resnet:depth=16,widen=2,norm=batch,width=0.5"),
]


@pytest.mark.parametrize(("deep", "shallow"), PAIRS)
@pytest.mark.parametrize("inner", ["own", "stream"])
def test_added_layers_change_no_output(deep, shallow, inner):
    target, built, probe = network(deep), network(shallow, 1), images(12)
    made = deepened(target, built, probe, inner)
    assert names(target, made.network) is not bool(made.notes)
    assert made.added and not made.stale
    assert apart(made.network, built, images(6, seed=1)) < 1e-5


@pytest.mark.parametrize(("deep", "shallow"), PAIRS)
def test_sources_tell_what_the_new_nodes_see(deep, shallow):
    target, built, probe = network(deep), network(shallow, 1), images(6)
    made = deepened(target, built, probe)
    old, new = wire(built, probe[:1]), wire(made.network, probe[:1])
    seen = observe(old, probe, features={source.node for source in made.sources.values()})
    again = observe(new, probe, features=made.sources.keys())
    for node, source in made.sources.items():
        values = features_of(seen, source.node)
        torch.testing.assert_close(features_of(again, node), values.relu() if source.rectified else values)
    points = {node for nodes in new.points.values() for node in nodes}
    assert {node for node in points if "branch" not in node and "first" not in node} <= made.sources.keys()


def test_group_norm_has_no_identity_and_is_left_out():
    target = network("vgg13:width=0.125,norm=group,groups=4")
    built, probe = network("vgg11:width=0.0625,norm=group,groups=4", 1), images(12)
    made = deepened(target, built, probe)
    missing = {key.rpartition(".")[0] for key in target.state_dict().keys() - made.network.state_dict().keys()}
    assert len(missing) == 2
    assert [note.partition(":")[0] for note in made.notes] == sorted(missing)
    assert all("added without its norm" in note for note in made.notes)
    assert apart(made.network, built, images(6, seed=1)) < 1e-5


def test_the_given_networks_stay_as_they_are():
    target, built, probe = network(PAIRS[8][0]), network(PAIRS[8][1], 1), images(12)
    before = [{name: tensor.clone() for name, tensor in each.state_dict().items()} for each in (target, built)]
    made = deepened(target, built, probe).network
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.zero_()
    for each, state in zip((target, built), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in each.state_dict().items())


def linear(weight: list[list[float]], bias: list[float]) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight))
    layer.weight, layer.bias = nn.Parameter(torch.tensor(weight)), nn.Parameter(torch.tensor(bias))
    return layer


@pytest.mark.parametrize(("method", "share"), [("sum", [1.0, 0.0]), ("majority", [0.0, 1.0]), ("average", [0.25, 0.75])])
def test_a_merged_layer_by_hand(method, share):
    """The second layer's pre-activations on the probe set are (-1, -1, -1, 5) and (1, 1, 1, -5)."""
    first = linear([[1.0], [-1.0]], [0.0, 0.0])
    second = linear([[1.0, 0.0], [-1.0, 0.0]], [-1.0, 1.0])
    last = linear([[2.0, 3.0]], [0.5])
    deep = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    target = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    probe = torch.tensor([[0.0], [0.0], [0.0], [6.0]])
    made = flattened(target, deep, probe, (0,), method).network
    d = torch.tensor(share)
    torch.testing.assert_close(made.get_parameter("2.weight"), (last.weight * d) @ second.weight)
    torch.testing.assert_close(made.get_parameter("2.bias"), torch.tensor([-2.0 * d[0] + 3.0 * d[1] + 0.5]))
    torch.testing.assert_close(made.get_parameter("0.weight"), first.weight)


values = st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=4)


@given(values)
@settings(max_examples=60, deadline=None)
def test_signs(rows):
    found = {method: relu_signs({"n": torch.tensor(rows).float()}, method)["n"].tolist() for method in METHODS}
    positive = [sum(x > 0 for x in row) / 5 for row in rows]
    assert found["sum"] == [float(sum(row) >= 0) for row in rows]
    assert found["majority"] == [float(share >= 0.5) for share in positive]
    assert found["average"] == pytest.approx(positive)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.data(), st.booleans(), st.sampled_from(METHODS))
@settings(max_examples=40, deadline=None)
def test_merging_is_exact_where_every_preactivation_is_positive(widths, data, bias, method):
    kept = tuple(sorted(data.draw(st.sets(st.integers(0, len(widths) - 1), min_size=1, max_size=len(widths) - 1))))
    deep = mlp(4, *widths, 3, bias=bias, seed=data.draw(st.integers(0, 999)))
    with torch.no_grad():
        for parameter in deep.parameters():
            parameter.abs_().add_(0.1)
    target = mlp(4, *[2] * len(kept), 3, bias=bias)
    probe = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)).double()
    made = flattened(target, deep, probe, kept, method)
    assert made.stale and names(target, made.network)
    torch.testing.assert_close(outputs(made.network, probe), outputs(deep, probe))


def test_a_bias_that_nothing_can_take_up():
    deep = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    target = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        deep.get_parameter("2.bias").fill_(1.0)
    with pytest.raises(UserError, match="layer '4' has no bias to absorb those of the layers merged into it"):
        flattened(target, deep, torch.randn(5, 2), (0,), "average")


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_removing_blocks_that_do_nothing_changes_no_output(norm):
    target, deep = network(f"resnet18:width=0.0625,norm={norm}"), network(f"resnet34:width=0.0625,norm={norm}", 1)
    probe = images(6)
    wiring = wire(deep, probe[:1])
    kept = places(wiring, r"stem|stage\d\.[01]\b")
    with torch.no_grad():
        for place in set(range(len(wiring.units))) - set(kept):
            last = wiring.units[place].layers[-1]
            for tensor in ("weight", "bias"):
                if f"{last}.{tensor}" in deep.state_dict():
                    deep.state_dict()[f"{last}.{tensor}"].zero_()
            if norm == "batch":
                deep.get_buffer(f"{last}.running_mean").zero_()
    made = flattened(target, deep, probe, kept)
    assert made.stale and names(target, made.network)
    assert apart(made.network, deep, probe) < 1e-9


def test_blocks_whose_skip_is_not_an_identity_stay():
    target, deep, probe = network("resnet18:width=0.0625"), network("resnet34:width=0.0625", 1), images(2)
    wiring = wire(deep, probe[:1])
    kept = places(wiring, r"stem|stage\d\.[12]\b")
    with pytest.raises(UserError, match=r"block 'extractor\.stage2\.0' cannot be removed: its skip is not an identity"):
        flattened(target, deep, probe, kept)


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_convolutions_are_not_merged(norm):
    target, deep = (network(f"{name}:width=0.125,norm={norm},groups=4") for name in ("vgg11", "vgg13"))
    with pytest.raises(UserError, match=r"layer 'extractor\.\d' cannot be merged into the next one: only linear layers"):
        deepened(target, deep, images(4))


def test_blocks_of_other_shortcuts_do_not_correspond():
    target, built = (network(f"wide_resnet:depth={depth},widen={widen}") for depth, widen in ((16, 1), (10, 2)))
    with pytest.raises(UserError, match=r"\(4 layers\) and '.*' \(5\) have different designs"):
        deepened(target, built, images(2))


class Repeated(nn.Module):
    """One layer that runs several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.times = times

    def forward(self, features):
        features = self.first(features).relu()
        for _ in range(self.times):
            features = self.shared(features).relu()
        return self.head(features)


def test_a_shared_module_runs_equally_often_in_both_networks():
    assert fuse([Repeated(2), Repeated(2)], into=1, depth=0, probe=torch.randn(20, 6)).network is not None
    message = r"'shared' runs 2 times in one network, and 'shared' 3 times in the other; take networks that run a shared"
    with pytest.raises(UserError, match=message):
        fuse([Repeated(2), Repeated(3)], into=1, depth=0, probe=torch.randn(20, 6))


def test_designs_that_differ_are_reported_with_both_layers():
    target, built = network("vgg13:width=0.0625,norm=none,bias=true"), network("vgg11:width=0.0625,norm=none")
    with pytest.raises(UserError, match=r"layer 'extractor\.0' .*weight\) does not fit .*weight, bias\).*different design"):
        deepened(target, built, images(4))
    with pytest.raises(UserError, match=r"'extractor\.\d+' \(\d layers\) and .* have different designs"):
        deepened(network("vgg13:width=0.0625,norm=batch"), built, images(4))
