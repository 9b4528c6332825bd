"""Sum aggregation at a site: what each mode starts from, what it minimises, what it sends and what it keeps."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.clients.data import site_examples, to_float
from fedloom.clients.networks import architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import OBJECTIVES, Session, Task, resolve
from fedloom.clients.objectives.plain import PlainSession
from fedloom.clients.objectives.sum_aggregation import ExactSession, RegularisedSession
from fedloom.clients.protocol.messages import MEAN, ROUND, SITE, STAR, SUBSET
from fedloom.conf import Config, UserError, load
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.state import State

SITES = 4


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def configured(mode: str, *overrides: str) -> Config:
    entries = ", ".join(["{domain: digits, samples: 40}"] * SITES)
    small = [f"sites=[{entries}]", "data.size=8", "network.width=0.25"]
    return load("digits", [*small, f"objective.mode={mode}", *overrides])


def part(state: Mapping[str, Tensor], prefix: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}


def extractors(*seeds: int) -> list[State]:
    """Random extractors that stand for what a server would send."""
    return [part(initial_state(configured("exact", f"seed={seed}")), "extractor.") for seed in seeds]


def head(seed: int = 90) -> State:
    return part(initial_state(configured("exact", f"seed={seed}")), "head.")


def opened(config: Config, incoming: dict[str, State], own: State | None = None, index: int = 0) -> Session:
    site = config.roster[index]
    task = Task(
        experiment=resolve(config),
        site=site,
        round=1,
        members=SITES,
        network=architecture_of(config).build(),
        incoming=incoming,
        load_local_state=lambda: own,
        generator=torch_generator(config.seed, site.name, "1", "objective"),
    )
    return OBJECTIVES.build(config.objective, "objective").session(task)


@functools.cache
def batch(n: int = 8) -> tuple[Tensor, Tensor]:
    config = configured("exact")
    images = site_examples(config, config.roster[0])
    return to_float(images.x[:n]), images.y[:n]


def cross_entropy(config: Config, state: State) -> float:
    """The loss of a network of its own, with these weights, on `batch`."""
    network = architecture_of(config).build()
    network.load_state_dict(state)
    images, labels = batch()
    with torch.no_grad():
        return float(F.cross_entropy(network(images), labels))


def value(loss: Tensor) -> float:
    return float(loss.detach())


def own_state(seed: int = 50) -> State:
    return initial_state(configured("exact", f"seed={seed}"))


def exact(*overrides: str, incoming: dict[str, State] | None = None) -> tuple[Config, ExactSession]:
    config = configured("exact", *overrides)
    given = incoming or {MEAN: {**extractors(1)[0], **head()}}
    session = opened(config, given, own_state())
    assert isinstance(session, ExactSession)
    return config, session


@given(st.integers(0, 10**6), st.floats(0.01, 100))
@settings(max_examples=20, deadline=None)
def test_exact_the_view_at_the_start_of_a_round_is_the_aggregate(seed, scale):
    mean = {name: tensor * scale for name, tensor in extractors(seed)[0].items()}
    _, session = exact(incoming={MEAN: {**mean, **head()}})
    for name, tensor in session.phi.items():
        target = mean[f"extractor.{name}"]
        view = tensor + session.offsets[0][name]
        assert (view - target).abs().max() <= 1e-6 * max(1.0, float(target.abs().max()))


def test_exact_the_loss_is_that_of_the_own_network_and_of_the_aggregate():
    mean = extractors(1)[0]
    config, session = exact("objective.own_weight=0.25", incoming={MEAN: {**mean, **head()}})
    own = {**part(own_state(), "extractor."), **head()}  # the head is the shared one, not the site's
    expected = 0.25 * cross_entropy(config, own) + cross_entropy(config, {**mean, **head()})
    assert value(session.loss(*batch())) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_exact_the_gradient_reaches_the_own_extractor_and_the_head(weight):
    _, session = exact(f"objective.own_weight={weight}")
    session.loss(*batch()).backward()
    for name, parameter in session.network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert {id(one) for one in session.parameters()} == {id(one) for one in session.network.parameters()}


def test_exact_the_aggregate_moves_by_exactly_the_step_of_the_own_network():
    mean = extractors(1)[0]
    config, session = exact("objective.own_weight=0", incoming={MEAN: {**mean, **head()}})
    step = {name: 0.01 * tensor for name, tensor in extractors(2)[0].items()}
    with torch.no_grad():
        for name, parameter in session.phi.items():
            parameter += step[f"extractor.{name}"]
    moved = {name: tensor + step[name] for name, tensor in mean.items()}
    assert value(session.loss(*batch())) == pytest.approx(cross_entropy(config, {**moved, **head()}), abs=1e-5)
    assert value(session.loss(*batch())) != pytest.approx(cross_entropy(config, {**mean, **head()}), abs=1e-5)


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_exact_leave_one_out_views_are_used_as_often_as_told_evenly_and_never_ones_own(probability):
    mean, mine, *others = extractors(1, 2, 3, 4, 5)
    names = [site.name for site in configured("exact").roster]
    incoming = {MEAN: {**mean, **head()}, SUBSET + names[0]: mine}
    incoming |= {SUBSET + name: state for name, state in zip(names[1:], others, strict=True)}
    config, session = exact(f"objective.subset_probability={probability}", "objective.own_weight=0", incoming=incoming)
    losses = [cross_entropy(config, {**state, **head()}) for state in (mean, *others)]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3  # they differ
    counts, draws, shown = np.zeros(len(losses)), 600, batch()
    for _ in range(draws):
        with torch.no_grad():
            seen = value(session.loss(*shown))
        [place] = [place for place, loss in enumerate(losses) if seen == pytest.approx(loss, abs=1e-4)]
        counts[place] += 1
    shares = counts / draws
    assert shares[0] == pytest.approx(1 - probability, abs=0.06 if probability == 0.5 else 0)
    assert shares[1:] == pytest.approx(probability / 3, abs=0.06)


def test_exact_a_site_that_is_sent_its_own_leave_one_out_view_alone_uses_the_aggregate():
    mean, mine = extractors(1, 2)
    incoming = {MEAN: {**mean, **head()}, SUBSET + "site-0000": mine}
    config, session = exact("objective.subset_probability=1", "objective.own_weight=0", incoming=incoming)
    assert value(session.loss(*batch())) == pytest.approx(cross_entropy(config, {**mean, **head()}), abs=1e-5)


def test_exact_sends_the_extractor_as_its_own_and_the_head_for_the_average_and_keeps_the_whole():
    _, session = exact()
    sent, kept = session.contribution(), session.local_state()
    assert kept is not None
    assert set(sent) == {SITE, ROUND}
    assert sent[SITE].keys() == part(kept, "extractor.").keys()
    assert sent[ROUND].keys() == head().keys()
    for name, tensor in part(own_state(), "extractor.").items():
        assert torch.equal(sent[SITE][name], tensor)
    for name, tensor in head().items():
        assert torch.equal(sent[ROUND][name], tensor)
        assert torch.equal(kept[name], tensor)


@pytest.mark.parametrize("mode", ["exact", "regularised", "independent"])
def test_a_site_that_never_trained_starts_from_the_shared_or_from_its_own_initialisation(mode):
    incoming = {MEAN: {**extractors(1)[0], **head()}, STAR: extractors(2)[0]}
    starts = {}
    for initialisation in ("shared", "own"):
        config = configured(mode, f"objective.initialisation={initialisation}")
        for index in (0, 1):
            sent = opened(config, incoming, index=index).contribution()[SITE]
            who = f"site-000{index}" if initialisation == "own" else "shared"
            for name, tensor in part(initial_state(config, who), "extractor.").items():
                assert torch.equal(sent[name], tensor)
            starts[initialisation, index] = torch.cat([tensor.flatten() for tensor in sent.values()])
    assert torch.equal(starts["shared", 0], starts["shared", 1])
    assert not torch.equal(starts["own", 0], starts["own", 1])


def regularised(*overrides: str, star: State) -> tuple[Config, RegularisedSession, State]:
    config = configured("regularised", "network.affine=true", "network.standardise=false", *overrides)
    mean = initial_state(configured("regularised", "network.affine=true", "seed=7"))
    own = initial_state(configured("regularised", "network.affine=true", "seed=8"))
    sent = {name: tensor for name, tensor in mean.items() if tensor.ndim == 4}
    session = opened(config, {MEAN: {**sent, **head()}, STAR: star}, own)
    assert isinstance(session, RegularisedSession)
    return config, session, sent


def stars(seed: int) -> State:
    return part(initial_state(configured("regularised", "network.affine=true", f"seed={seed}")), "extractor.")


@pytest.mark.parametrize(("others", "moving"), [("alike", SITES), ("still", 1)])
@pytest.mark.parametrize("norm", ["squared", "frobenius"])
def test_regularised_the_penalty_is_the_distance_of_the_star_from_the_sum_as_it_moves(norm, others, moving):
    star = stars(9)
    _, session, mean = regularised(f"objective.norm={norm}", f"objective.others={others}", star=star)
    begin = {name: tensor.detach().clone() for name, tensor in session.network.named_parameters()}
    with torch.no_grad():
        for parameter in session.network.parameters():
            parameter *= 1.1  # a step
    by_hand = 0.0
    for name, average in mean.items():
        now = session.network.get_parameter(name).detach().double().numpy()
        total = SITES * average.double().numpy() + moving * (now - begin[name].double().numpy())
        square = float(np.square(star[name].double().numpy() - total).sum())
        by_hand += square if norm == "squared" else square**0.5
    assert by_hand > 1
    assert value(session.penalty()) == pytest.approx(by_hand, rel=1e-4)


def test_regularised_the_gradient_of_the_penalty_is_that_of_equation_3_or_n_times_it():
    """Eq. 3: d/dW_i ||W* - sum_j W_j||^2 = -2 (W* - sum_j W_j)."""
    for others, times in (("still", 1), ("alike", SITES)):
        star = stars(9)
        _, session, mean = regularised(f"objective.others={others}", star=star)
        session.penalty().backward()
        for name, average in mean.items():
            expected = -2.0 * times * (star[name] - SITES * average)
            found = session.network.get_parameter(name).grad
            assert found is not None and torch.allclose(found, expected, rtol=1e-4, atol=1e-5), (others, name)


@pytest.mark.parametrize("norm", ["squared", "frobenius"])
def test_regularised_the_penalty_is_zero_where_the_star_is_the_sum_and_its_gradient_is_finite(norm):
    _, _, mean = regularised(star=stars(9))
    star = {**stars(9), **{name: SITES * tensor for name, tensor in mean.items()}}
    _, session, _ = regularised(f"objective.norm={norm}", star=star)
    penalty = session.penalty()
    penalty.backward()
    assert value(penalty) == pytest.approx(0, abs=1e-4)
    gradients = [parameter.grad for parameter in session.parameters() if parameter.grad is not None]
    assert len(gradients) == 12  # six convolutions, N's and N*'s
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_regularised_the_loss_is_two_cross_entropies_and_the_penalty():
    star = stars(9)
    config, session, _ = regularised("objective.strength=0.5", "objective.own_weight=2", star=star)
    own = {name: tensor.detach() for name, tensor in session.network.state_dict().items()}
    expected = 2 * cross_entropy(config, own) + cross_entropy(config, {**star, **head()})
    loss = session.loss(*batch())
    assert value(loss) == pytest.approx(expected + 0.5 * value(session.penalty()), rel=1e-4)
    loss.backward()
    for parameter in session.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


def test_regularised_sends_its_extractor_as_its_own_and_the_star_with_the_head_for_the_average():
    star = stars(9)
    _, session, _ = regularised(star=star)
    sent = session.contribution()
    assert set(sent) == {SITE, ROUND}
    assert sent[ROUND].keys() == star.keys() | head().keys()
    for name, tensor in star.items():
        assert torch.equal(sent[ROUND][name], tensor)
        assert torch.equal(sent[SITE][name], session.network.get_parameter(name))
    with torch.no_grad():
        for parameter in session.star.parameters():
            parameter += 1  # N* and N_i are two networks
    assert all(torch.equal(sent[SITE][name], tensor) for name, tensor in session.contribution()[SITE].items())


@pytest.mark.parametrize("seed", [1, 2])
def test_independent_ignores_what_the_server_sends(seed):
    config = configured("independent")
    session = opened(config, {MEAN: {**extractors(seed)[0], **head(seed)}}, own_state())
    assert isinstance(session, PlainSession)
    for name, tensor in own_state().items():
        assert torch.equal(session.network.state_dict()[name], tensor)
    assert value(session.loss(*batch())) == pytest.approx(cross_entropy(config, own_state()), abs=1e-6)
    assert session.contribution()[SITE].keys() == own_state().keys()  # its own head included


def test_fedavg_starts_from_the_aggregate_and_keeps_nothing():
    config = configured("fedavg")
    mean = {**extractors(1)[0], **head()}
    session = opened(config, {MEAN: mean}, own_state())
    assert session.local_state() is None
    sent = session.contribution()
    assert set(sent) == {ROUND}
    assert sent[ROUND].keys() == mean.keys()
    assert all(torch.equal(sent[ROUND][name], tensor) for name, tensor in mean.items())
    assert value(session.loss(*batch())) == pytest.approx(cross_entropy(config, mean), abs=1e-6)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("mode=exat", r"objective\.mode: got 'exat', takes one of: exact, regularised, independent, fedavg"),
        ("norm=l1", r"objective\.norm: got 'l1', takes one of: squared, frobenius"),
        ("subset_probability=1.5", r"objective\.subset_probability: got 1\.5, takes a number from 0\.0 to 1\.0"),
        ("own_weight=-1", r"objective\.own_weight: got -1"),
        ("strenght=1", r"unknown key 'objective\.strenght'; did you mean 'objective\.strength'\?"),
        ("mu=0.1", r"objective\.mu: an option of fedprox, not of sum_aggregation$"),
        ("name=sum", r"unknown objective 'sum'"),
    ],
)
def test_options_that_cannot_be_are_refused_by_their_key(option, line):
    with pytest.raises(UserError, match=line):
        OBJECTIVES.build(load("digits", [f"objective.{option}"]).objective, "objective")


def test_options_are_frozen():
    objective = OBJECTIVES.build({"name": "sum_aggregation"}, "objective")
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.mode = "fedavg"  # type: ignore[attr-defined,misc]
