"""What is seen on a probe set, against hooks that look for themselves; what the look leaves alone; bad probe sets."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.matching import layer_costs
from fedloom.fusion.graph.channels import Wiring, wire
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.probe import BATCH, Moments, check_probe, features_of, moments_of, observe
from tests.fusion.parts import apart, images, network

VGG = "vgg11:width=0.0625,norm=batch"
RESNET = "resnet18:width=0.0625"


def hooked(built: nn.Module, wiring: Wiring, probe: Tensor) -> dict[str, Tensor]:
    """The outputs of all layers by node, copied at once."""
    seen: dict[str, Tensor] = {}
    handles = []
    for layer in wiring.layers:

        def keep(_module: nn.Module, _inputs: object, value: Tensor, node: str = layer.node) -> None:
            seen[node] = value.clone()

        handles.append(built.get_submodule(layer.name).register_forward_hook(keep))
    with torch.no_grad():
        built.eval()(probe)
    for handle in handles:
        handle.remove()
    return seen


def channels(value: Tensor) -> Tensor:
    return value.flatten(2).movedim(1, 0).flatten(1) if value.ndim > 2 else value.T


def nodes_of(wiring: Wiring) -> list[str]:
    return [layer.node for layer in wiring.layers]


@pytest.mark.parametrize("text", [VGG, RESNET, "mlp:widths=[9,8]", "lenet"])
def test_everything_that_is_seen(text):
    built, probe = network(text), images(6)
    wiring = wire(built, probe[:1])
    expected, nodes = hooked(built, wiring, probe), nodes_of(wiring)
    seen = observe(wiring, probe, features=nodes, grams=nodes, moments=nodes)
    for node in nodes:
        rows = channels(expected[node])
        torch.testing.assert_close(features_of(seen, node), rows)
        flat = expected[node].flatten(1)
        torch.testing.assert_close(seen.grams[node], [flat @ flat.T])
        torch.testing.assert_close(seen.moments[node].mean, rows.mean(dim=1))
        torch.testing.assert_close(seen.moments[node].std, rows.std(dim=1, correction=0))
        assert seen.moments[node].count == rows.shape[1]


def test_features_are_those_before_a_relu_in_place():
    built, probe = network(VGG), images(6)
    assert any(isinstance(module, nn.ReLU) and module.inplace for module in built.modules())
    wiring = wire(built, probe[:1])
    points = [node for nodes in wiring.points.values() for node in nodes]
    seen = observe(wiring, probe, features=points)
    assert all(features_of(seen, node).min() < 0 for node in points)


@pytest.mark.parametrize("text", [VGG, RESNET])
@pytest.mark.parametrize("mode", [True, False])
def test_the_network_and_the_probe_set_are_left_alone(text, mode):
    built, probe = network(text), images(6)
    built.train(mode)
    next(module for module in built.modules() if isinstance(module, nn.BatchNorm2d)).train(not mode)
    before, flags, given_set = copy.deepcopy(built.state_dict()), [m.training for m in built.modules()], probe.clone()
    wiring = wire(built, probe[:1])
    observe(wiring, probe, features=nodes_of(wiring), grams=nodes_of(wiring))
    assert [module.training for module in built.modules()] == flags
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.state_dict().items())
    assert torch.equal(probe, given_set)


def test_an_error_inside_leaves_the_flags_alone():
    built = network(VGG).train()
    with pytest.raises(RuntimeError), evaluating(built):
        assert not any(module.training for module in built.modules())
        raise RuntimeError
    assert all(module.training for module in built.modules())


def test_several_batches():
    built, probe = network("mlp:widths=[9,8]", size=2), images(BATCH + 40, 2)
    wiring = wire(built, probe[:1])
    expected, nodes = hooked(built, wiring, probe), nodes_of(wiring)
    seen = observe(wiring, probe, features=nodes, grams=nodes, moments=nodes)
    for node in nodes:
        rows = expected[node]
        assert [len(gram) for gram in seen.grams[node]] == [BATCH, 40]
        torch.testing.assert_close(seen.grams[node], [part @ part.T for part in rows.split(BATCH)])
        torch.testing.assert_close(features_of(seen, node), rows.T)
        torch.testing.assert_close(seen.moments[node].std, rows.std(dim=0, correction=0))


def test_long_grams_are_multiplied_out_by_pieces():
    network = nn.Sequential(nn.Conv2d(1, 40, 1), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 576, 2))
    probe = images(4, 24, 1).float()
    wiring = wire(network, probe[:1])
    node = wiring.units[0].node
    flat = hooked(network, wiring, probe)[node].flatten(1).double()
    torch.testing.assert_close(observe(wiring, probe, grams=[node]).grams[node], [flat @ flat.T], rtol=1e-5, atol=1e-4)


def test_a_bounded_number_of_positions_the_same_in_every_network():
    probe = images(6)
    narrow, wide = network(VGG), network("vgg13:width=0.25,norm=batch", 1)
    found = []
    for built in (narrow, wide):
        wiring = wire(built, probe[:1])
        node = wiring.points[wiring.units[0].axis][0]
        found.append(features_of(observe(wiring, probe, features=[node], positions=120), node))
        whole = features_of(observe(wiring, probe, features=[node]), node)
        assert set(found[-1][0].tolist()) <= set(whole[0].tolist())
    assert found[0].shape == (8, 120) and found[1].shape == (16, 120)
    assert len(set(found[0][0].tolist())) == 120


sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))


@given(sizes, st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_moments_add_up(shape, more, flat, seed):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape[0] + more, *shape[1 : 2 if flat else 3], generator=generator).double()
    whole, parts = moments_of(value), moments_of(value[:more]) + moments_of(value[more:])
    rows = channels(value)
    for moments in (whole, parts):
        assert moments.count == rows.shape[1]
        torch.testing.assert_close(moments.mean, rows.mean(dim=1))
        torch.testing.assert_close(moments.std, rows.std(dim=1, correction=0), atol=1e-7, rtol=1e-7)


def test_a_constant_channel_has_no_deviation():
    value = moments_of(torch.full((7, 1), 0.1))
    assert isinstance(value, Moments)
    assert value.std.item() < 1e-4


GOOD = images(4)


@pytest.mark.parametrize(
    ("probe", "line"),
    [
        (GOOD[:0], r"the probe set has the shape \[0, 3, 32, 32\]; use \[k, \.\.\.\] with k >= 2"),
        (GOOD[:1], r"shape \[1, 3, 32, 32\]"),
        (GOOD[0, 0, 0], r"shape \[32\]"),
        (GOOD.index_fill(0, torch.tensor([2]), torch.nan), "holds values that are not finite"),
        (GOOD.index_fill(0, torch.tensor([2]), torch.inf), "holds values that are not finite"),
        (GOOD.float(), "the probe set is torch.float32, the network torch.float64"),
        (GOOD.to("meta"), "the probe set is on meta, the network on cpu"),
    ],
)
def test_bad_probe_sets(probe, line):
    built = network(VGG)
    with pytest.raises(UserError, match=line):
        check_probe(built, probe)
    with pytest.raises(UserError, match=line):
        observe(wire(built, GOOD[:1]), probe)
    with pytest.raises(UserError, match="network 0: .*" + line):
        layer_costs(built, built, probe)
    with pytest.raises(UserError, match="network 0: .*" + line):
        fuse([built, built], into=0, probe=probe)


def test_weights_that_are_not_finite_are_named():
    built = network(VGG)
    with torch.no_grad():
        built.get_parameter("extractor.8.weight")[0, 0] = torch.nan
    wiring = wire(built, GOOD[:1])
    with pytest.raises(UserError, match=r"layer 'extractor\.8': its outputs are not finite"):
        layer_costs(built, network(VGG, 1), GOOD)
    with pytest.raises(UserError, match=r"layer 'extractor\.8'"):
        observe(wiring, GOOD, features=nodes_of(wiring))
    with pytest.raises(UserError, match=r"network 1: tensor 'extractor\.8\.weight' holds values that are not finite"):
        fuse([network(VGG, 1), built], into=0, probe=GOOD)


def test_a_look_that_is_repeated_is_the_same():
    built, probe = network(RESNET), images(6)
    again = copy.deepcopy(built)
    wiring = wire(built, probe[:1])
    points = [node for nodes in wiring.points.values() for node in nodes]
    one, two = (observe(wiring, probe, features=points, positions=60) for _ in range(2))
    assert all(torch.equal(features_of(one, node), features_of(two, node)) for node in points)
    assert apart(built, again, probe) == 0.0


def test_a_network_that_overwrites_its_input_spoils_no_probe_set():
    built = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)).double()
    probe = images(5, 2, 1).flatten(1)
    before = probe.clone()
    fuse([built, copy.deepcopy(built)], into=0, probe=probe)
    assert torch.equal(probe, before) and probe.min() < 0
