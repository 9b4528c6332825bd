"""Layer selection: the tree against configurations one by one, the posterior against its equations, the base learners."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NETWORKS, Architecture, Network, initialise
from fedloom.clients.objectives.layer_selection.configurations import Configuration, every, named
from fedloom.clients.objectives.layer_selection.layers import Layers, grouped
from fedloom.clients.objectives.layer_selection.learners import BASE_LEARNERS
from fedloom.clients.objectives.layer_selection.posterior import LIKELIHOODS, PRIORS, Belief, by_winner, shares
from fedloom.clients.objectives.layer_selection.search import Exact, Pace, Pruned, Sampled, Step
from fedloom.clients.objectives.layer_selection.tree import Tree, layers_of, operations
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from tests.server.parts import one_thread

CHAIN = {"name": "convnet", "widths": [3, 4, 3], "pools": [2], "hidden": [5], "norm": "none", "bias": True}
NORMED = {"name": "convnet", "widths": [4, 4, 4], "norm": "batch"}
RESIDUAL = {"name": "resnet20", "width": 0.25}
DENSE = {"name": "mlp", "widths": [6, 5, 4]}
NETWORKS_AND_GROUPS: list[tuple[dict[str, Any], list[int]]] = [
    (CHAIN, []), (CHAIN, [1, 2]), (NORMED, []), (RESIDUAL, [7, 6, 6]), (DENSE, [])
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    one_thread()
    yield
    torch.set_num_threads(before)


def built(section: dict[str, Any], seed: int = 0) -> Network:
    network = NETWORKS.build(section, "network").empty(Form.images(1, 8, 3))
    initialise(network, torch_generator(seed, "network"))
    return network.double()


def drawn(layers: Layers, network: Network, kind: str) -> dict[str, Tensor]:
    """Shared or own parameters of another start than the network's, float64."""
    state = {name: one.detach() + 0.3 for name, one in network.state_dict().items()}
    found: dict[str, Tensor] = {}
    for place, layer in enumerate(layers.names):
        tensors = {part: state[f"{layer}.{part}"] for part in ("weight", "bias") if f"{layer}.{part}" in state}
        made = getattr(layers.learner, kind)(tensors, torch_generator(place, kind))
        found |= {f"{layer}.{name}": (one.double() + 0.01).requires_grad_() for name, one in made.items()}
    return found


def layers(section: dict[str, Any], sizes: list[int], learner: str = "hps") -> Layers:
    import json

    architecture = Architecture(json.dumps(section), Form.images(1, 8, 3))
    return grouped(architecture, (), tuple(sizes), BASE_LEARNERS.build({"name": learner}, ""), 10)


def one_by_one(network: Network, layers: Layers, weights: dict[str, Tensor], one: Configuration, images: Tensor) -> Tensor:
    """The scores under one configuration, of the whole network at once."""
    used = {name: weight for name, weight in weights.items() if one[layers.group_of(name)]}
    return functional_call(network, used, (images,))


def batch(images: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch_generator(1, "batch")
    return torch.randn(images, 1, 8, 8, generator=generator).double(), torch.arange(images) % 3


def uniform(configurations: list[Configuration], fixed: Tensor | None = None) -> Belief:
    nothing = torch.zeros(len(configurations), dtype=torch.float64)
    return Belief(configurations, nothing, nothing, by_winner, fixed)


def step_of(network: Network, mine: Layers, weights: dict[str, Tensor], belief: Belief, **more: Any) -> Step:
    images, labels = batch()
    tree, draw = Tree(network, mine.groups), torch_generator(0, "draws")
    return Step(tree, belief, LIKELIHOODS["mean"], weights, slice(0, 3), images, labels, draw, **more)


@pytest.mark.parametrize(("section", "sizes"), NETWORKS_AND_GROUPS, ids=lambda one: str(one)[:30])
def test_the_tree_gives_what_each_configuration_gives_by_itself(section: dict[str, Any], sizes: list[int]):
    network, mine = built(section), layers(section, sizes)
    weights = mine.weights(drawn(mine, network, "shared"), drawn(mine, network, "own"))
    images, tree = batch()[0], Tree(network, mine.groups)

    @settings(max_examples=8, deadline=None)
    @given(st.lists(st.sampled_from(every(len(mine.groups))), min_size=1, max_size=9))
    def check(configurations: list[Configuration]) -> None:
        found = tree.scores(configurations, weights, images)
        for one, scores in zip(configurations, found, strict=True):
            torch.testing.assert_close(scores, one_by_one(network, mine, weights, one, images), atol=1e-10, rtol=1e-8)

    check()


@pytest.mark.parametrize("learner", ["hps", "tf", "df_cnn"])
def test_gradients_are_the_posterior_weighted_sum_over_all_configurations(learner: str):
    network, mine = built(CHAIN), layers(CHAIN, [], learner)
    shared, own = drawn(mine, network, "shared"), drawn(mine, network, "own")
    parameters = [*network.parameters(), *shared.values(), *own.values()]
    belief = uniform(every(3))
    loss, posterior = Exact().step(step_of(network, mine, mine.weights(shared, own), belief))
    found = torch.autograd.grad(loss, parameters)
    images, labels = batch()
    wanted = [torch.zeros_like(one) for one in parameters]
    likelihoods = []
    for probability, one in zip(
        posterior, every(3), strict=True
    ):  # Eq. 3 and 4: the sum of P(c | X, y) grad log P(y | X, c)
        scores = one_by_one(network, mine, mine.weights(shared, own), one, images)
        likelihoods.append(scores.softmax(1)[torch.arange(6), labels].mean())
        gradients = torch.autograd.grad(F.cross_entropy(scores, labels), parameters, materialize_grads=True)
        wanted = [total + probability * gradient for total, gradient in zip(wanted, gradients, strict=True)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)
    brute = torch.stack(likelihoods).detach()
    torch.testing.assert_close(posterior, brute / brute.sum(), atol=1e-10, rtol=1e-8)  # Eq. 2 with a uniform prior


def test_a_draw_has_the_gradient_of_its_configuration_and_draws_follow_the_posterior():
    network, mine = built(CHAIN), layers(CHAIN, [])
    weights = mine.weights(drawn(mine, network, "shared"), {})
    posterior = torch.tensor([0.4, 0.0, 0.1, 0.0, 0.2, 0.0, 0.3, 0.0], dtype=torch.float64)
    belief = uniform(every(3))
    step = step_of(network, mine, weights, belief, held=posterior)
    each = {i: float(step.losses(torch.tensor([i]))[1].mean()) for i in range(8)}
    losses = [float(Sampled(draws=1).step(step)[0].detach()) for _ in range(400)]
    seen = [sum(math.isclose(loss, one, rel_tol=1e-9) for loss in losses) / 400 for one in each.values()]
    assert sum(seen) == 1.0 and seen == pytest.approx(posterior.tolist(), abs=0.1)  # four standard deviations
    many = float(Sampled(draws=3000).step(step)[0].detach())
    exact = float(step.weighted(posterior, torch.arange(8), step.losses(torch.arange(8))[1]))
    assert many == pytest.approx(exact, rel=0.02) and float(belief.counts.sum()) == 0


def test_the_sampled_expectation_step_looks_at_a_part_of_the_batch():
    network, mine = built(CHAIN), layers(CHAIN, [])
    weights = mine.weights(drawn(mine, network, "shared"), {})
    whole = Sampled(part=1.0).step(step_of(network, mine, weights, uniform(every(3))))[1]
    exact = Exact().step(step_of(network, mine, weights, uniform(every(3))))[1]
    torch.testing.assert_close(whole, exact)
    step = step_of(network, mine, weights, uniform(every(3)))
    half = Exact().step(replace(step, belief=uniform(every(3)), images=step.images[:3], labels=step.labels[:3]))[1]
    torch.testing.assert_close(Sampled(part=0.5).step(step)[1], half)


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 50), min_size=8, max_size=8), left_out=st.floats(0.0, 0.9))
def test_what_pruning_leaves_out_is_as_unlikely_as_it_says(counts: list[int], left_out: float):
    network, mine = built(CHAIN), layers(CHAIN, [])
    weights = mine.weights(drawn(mine, network, "shared"), {})
    belief = uniform(every(3))
    belief.counts += torch.tensor(counts)
    prior = belief.prior()
    kept = belief.likely(left_out)
    assert float(prior[kept].sum()) >= 1 - left_out - 1e-12
    worst = prior[kept].min()
    assert len(kept) == 1 or float(prior[kept].sum() - worst) < 1 - left_out  # the fewest
    step = step_of(network, mine, weights, belief)
    likelihood = torch.exp(LIKELIHOODS["mean"](-step.losses(torch.arange(8))[1]))
    posterior = prior * likelihood / (prior * likelihood).sum()
    bound = left_out / (left_out + float((prior * likelihood)[kept].sum()))
    assert 1 - float(posterior[kept].sum()) <= bound + 1e-12
    watched = belief.watched(left_out)
    assert len(watched) == min(8, len(kept) + 1) and set(kept.tolist()) <= set(watched.tolist())
    found = Pruned(left_out=left_out).step(step)[1]
    torch.testing.assert_close(found[watched], posterior[watched] / posterior[watched].sum())
    assert float(found.sum()) == pytest.approx(1.0)


def test_pruning_looks_at_all_configurations_in_turn():
    """Once those of equal priors at the end of the list were never looked at."""
    belief, seen = uniform(every(5)), set[int]()
    for _ in range(200):
        seen |= set(belief.watched(0.05).tolist())
        belief.learn(torch.nn.functional.one_hot(torch.tensor(3), 32).double())
    assert seen == set(range(32))


def test_expectation_maximisation_finds_the_configuration_that_a_problem_was_made_for():
    """The labels are those of a network whose first layer is the shared one and whose second is not; shared layers, and the
    site's own ones, start there where they should be used and far from it elsewhere."""
    network, mine = built({"name": "mlp", "widths": [16, 12]}, seed=3), layers({"name": "mlp", "widths": [16, 12]}, [])
    with torch.no_grad():
        network.get_parameter("head.weight").mul_(30.0)  # so that it is sure of its answers
    truth = {name: one.clone() for name, one in network.state_dict().items()}
    shared = {name: one.clone() * (1.0 if mine.group_of(name) == 0 else -1.0) for name, one in truth.items()
              if name.startswith("extractor")}  # fmt: skip
    with torch.no_grad():
        network.get_parameter(f"{mine.names[0]}.weight").mul_(-1.0)
    images = torch.randn(200, 1, 8, 8, generator=torch_generator(2, "images")).double()
    labels = functional_call(network, truth, (images,)).argmax(1).detach()
    for way, likelihood in [(Exact(), "mean"), (Exact(), "joint"), (Sampled(part=0.5), "mean"), (Pruned(), "mean")]:
        belief, tree, posterior = uniform(every(2)), Tree(network, mine.groups), torch.zeros(4)
        for start in range(0, 4000, 10):
            chosen = slice(start % 200, start % 200 + 10)
            step = Step(tree, belief, LIKELIHOODS[likelihood], shared, slice(0, 3), images[chosen], labels[chosen],
                        torch_generator(start, "draws"))  # fmt: skip
            posterior = way.step(step)[1]
        assert belief.best() == (1, 0) and float(posterior[every(2).index((1, 0))]) >= 0.95, (way, likelihood)


def test_the_prior_counts_the_most_probable_configurations():
    belief = uniform(every(2))
    assert belief.prior().tolist() == [0.25] * 4
    belief.learn(torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64))
    belief.learn(torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64))
    assert belief.prior().tolist() == [1 / 6, 3 / 6, 1 / 6, 1 / 6]  # (n_c + 1) over their sum, Eq. 1
    assert belief.best() == (0, 1)
    smooth = replace(uniform(every(2)), update=PRIORS["posteriors"])
    smooth.learn(torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64))
    torch.testing.assert_close(smooth.prior(), torch.tensor([1.1, 1.6, 1.2, 1.1], dtype=torch.float64) / 5)
    informed = replace(uniform(every(2)), others=torch.tensor([0.0, 0.0, 0.0, 12.0], dtype=torch.float64))
    assert informed.prior().tolist() == [1 / 16, 1 / 16, 1 / 16, 13 / 16]
    torch.testing.assert_close(shares(belief, belief.prior()), torch.tensor([2 / 6, 4 / 6], dtype=torch.float64))


def test_a_configuration_that_is_given_stays_as_probable_as_it_was():
    fixed = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    belief = uniform(every(2), fixed)
    belief.learn(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    assert belief.posterior(torch.tensor([9.0, -9.0]), torch.tensor([0, 1])).tolist() == fixed.tolist()
    assert belief.best() == (0, 1) and belief.likely(0.05).tolist() == [1]


def test_likelihoods_are_those_of_probability():
    probabilities = torch.tensor([[0.5, 0.1], [0.2, 0.9]], dtype=torch.float64)
    torch.testing.assert_close(
        LIKELIHOODS["mean"](probabilities.log()).exp(), torch.tensor([0.3, 0.55], dtype=torch.float64)
    )
    torch.testing.assert_close(
        LIKELIHOODS["joint"](probabilities.log()).exp(), torch.tensor([0.05, 0.18], dtype=torch.float64)
    )


@pytest.mark.parametrize(("likelihood", "best"), [("mean", (0,)), ("joint", (1,))])
def test_the_joint_likelihood_of_a_batch_leaves_the_first_winner_and_the_mean_stays_with_it(likelihood: str, best: tuple):
    """Batches of ten images: the first configuration is a little better at the start, the second twice as good later."""
    early, late = (torch.tensor([[one] * 10, [other] * 10]).log() for one, other in ((0.12, 0.10), (0.2, 0.4)))
    belief = uniform(every(1))
    for probabilities in [early] * 20 + [late] * 60:
        belief.learn(belief.posterior(LIKELIHOODS[likelihood](probabilities), torch.tensor([0, 1])))
    assert belief.best() == best


def test_a_posterior_holds_for_as_many_steps_as_are_asked_for():
    pace, found = Pace(3), []
    for number in range(7):
        found.append(pace.due() is None)
        pace.took(torch.tensor([float(number)]))
    assert found == [True, False, False, True, False, False, True]


def test_base_learners_start_at_the_layers_shapes_and_share_what_they_say():
    for name, mine in {"hps": 0, "tf": 5, "df_cnn": 4}.items():
        learner, layer = BASE_LEARNERS.build({"name": name}, ""), {"weight": torch.randn(6, 4, 3, 3), "bias": torch.zeros(6)}
        shared, own = (getattr(learner, kind)(layer, torch_generator(0)) for kind in ("shared", "own"))
        made = learner.weights(shared, own)
        assert {key: one.shape for key, one in made.items()} == {key: one.shape for key, one in layer.items()}
        assert len(own) == mine
    core = {"core": torch.randn(6, 4, 3, 3)}
    tf = BASE_LEARNERS.build({"name": "tf"}, "")
    own = tf.own({"weight": core["core"], "bias": torch.zeros(6)}, torch_generator(0))
    torch.testing.assert_close(tf.weights(core, own)["weight"], core["core"])
    turned = {**own, "factor0": torch.randn(6, 6), "factor2": torch.randn(3, 3)}
    wanted = torch.einsum("oihw,oa,hb->aibw", core["core"], turned["factor0"], turned["factor2"])
    torch.testing.assert_close(tf.weights(core, turned)["weight"], wanted)
    weights = torch.stack([_made("df_cnn", seed) for seed in range(40)])
    assert float(weights.var()) == pytest.approx(2 / (16 * 9), rel=0.5)  # as He's start of the layer


def _made(name: str, seed: int) -> Tensor:
    learner, layer = BASE_LEARNERS.build({"name": name}, ""), {"weight": torch.zeros(16, 16, 3, 3)}
    generator = torch_generator(seed)
    return learner.weights(learner.shared(layer, generator), learner.own(layer, generator))["weight"]


def test_configurations_have_names():
    texts = ("all", "none", "alternating", "top-2", "bottom-1", "0110", "only-2-4", "only-1")
    assert [named(text, 4, "") for text in texts] == [
        (1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (1, 0, 0, 0)
    ]  # fmt: skip
    assert len({*every(5)}) == 32
    with pytest.raises(UserError, match=r"objective.mode: '01' has 2 digits, but there are 4 groups of layers"):
        named("01", 4, "objective.mode")
    for odd in ("top-5", "top-0", "middle", "top", "", "012", "only", "only-5", "only-"):
        with pytest.raises(UserError, match="takes learned, all, none, alternating"):
            named(odd, 4, "objective.mode")


def test_groups_cover_the_layers_and_there_are_not_too_many():
    assert [len(group) for group in layers(RESIDUAL, [7, 6, 6]).groups] == [7, 7, 7]  # two with a shortcut's convolution
    with pytest.raises(UserError, match=r"objective.groups: 7 \+ 6 = 13, but there are \d+ layers: extractor"):
        layers(RESIDUAL, [7, 6])
    with pytest.raises(
        UserError, match=r"configurations, but objective.limit=10 allows 1024; group the \d+ layers, as in groups="
    ):
        layers(RESIDUAL, [])
    with pytest.raises(UserError, match=r"df_cnn takes convolutions with odd square kernels; 'extractor.1' has weights"):
        layers(DENSE, [], "df_cnn")


def test_groups_that_one_tensor_does_not_separate_are_named():
    network = built(RESIDUAL)
    names = layers_of(network)[1]
    with pytest.raises(UserError, match=r"cannot be cut between .*: several tensors pass; put these layers"):
        Tree(network, [names[:2], names[2:]])


def test_the_tree_of_the_papers_network_costs_nine_networks():
    costs = [0.885, 9.44, 4.72, 9.44, 0.27]  # million multiplications per image, 32 x 32: convolutions 32-32-64-64, the rest
    assert operations(costs, every(4)) / sum(costs) == pytest.approx(9.4, abs=0.1)
    assert operations(costs, [(0, 1, 0, 1)]) == pytest.approx(sum(costs))


def test_an_expectation_step_leaves_nothing_out():
    """Dropout is for the maximisation step alone: two E-steps on the same images have the same posterior."""
    section = {**CHAIN, "dropout": 0.5}
    network, mine = built(section).train(), layers(section, [])
    weights = mine.weights(drawn(mine, network, "shared"), {})
    step = step_of(network, mine, weights, uniform(every(3)))
    places = torch.arange(8)
    first, second = step.losses(places)[0], step.losses(places)[0]
    assert not torch.equal(first, second)
    with torch.no_grad():
        assert torch.equal(step.losses(places)[0], step.losses(places)[0])
    network.eval()
    undropped = step.losses(places)[1]
    network.train()
    for way in (Exact(), Sampled(part=1.0)):
        posterior = way.step(replace(step, belief=uniform(every(3))))[1]
        expected = uniform(every(3)).posterior(LIKELIHOODS["mean"](-undropped), places)
        torch.testing.assert_close(posterior, expected)
    assert all(one.training for one in network.modules())
