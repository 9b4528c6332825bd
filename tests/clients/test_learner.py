"""The local learner: its learning rate, its randomness, and how it says that a training has failed."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.clients.data import Examples, site_examples, to_float
from fedloom.clients.networks import architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import OBJECTIVES, Session, Task, resolve
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.protocol.messages import MEAN, ROUND
from fedloom.clients.training.learner import DivergedError, Outcome, batches, learn, step_count
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf import Config, load
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.fusion.state import State, digest
from fedloom.server.run.checks import check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def configured(*overrides: str) -> Config:
    sites = "sites=[{domain: digits, samples: 70}, {domain: digits, samples: 70}]"
    return load("digits", [sites, "data.size=8", "network.width=0.25", "rounds=4", *overrides])


def session(config: Config, index: int = 0, round: int = 1) -> Session:
    """FedAvg's session: one network, from the shared initialisation."""
    site = config.roster[index]
    task = Task(
        experiment=resolve(config),
        site=site,
        round=round,
        members=2,
        network=architecture_of(config).build(),
        incoming={MEAN: initial_state(config)},
        load_local_state=lambda: None,
        generator=torch_generator(config.seed, site.name, str(round), "objective"),
    )
    return OBJECTIVES.build({"name": "sum_aggregation", "mode": "fedavg"}, "objective").session(task)


def learned(config: Config, round: int = 1, images: Examples | None = None) -> tuple[Outcome, State]:
    """What site 0 makes of the shared initialisation in one round, on its own images or on those given."""
    site, at_work = config.roster[0], session(config, round=round)
    outcome = learn(at_work, images or site_examples(config, site), resolve(config), site, round, CPU)
    return outcome, at_work.contribution()[ROUND]


class Watched(Session):
    """A session that keeps the batches it is shown."""

    def __init__(self, inner: Session) -> None:
        self.inner = inner
        self.images: list[Tensor] = []
        self.labels: list[Tensor] = []

    def parameters(self):
        return self.inner.parameters()

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.images.append(images.clone())
        self.labels.append(labels.clone())
        return self.inner.loss(images, labels)

    def contribution(self):
        return self.inner.contribution()

    def local_state(self):
        return self.inner.local_state()


def watched(config: Config, round: int = 1) -> tuple[Watched, Examples]:
    site, at_work = config.roster[0], Watched(session(config))
    images = site_examples(config, site)
    learn(at_work, images, resolve(config), site, round, CPU)
    return at_work, images


@given(st.integers(1, 1000), st.floats(1e-6, 10))
def test_cosine_starts_at_the_rate_halves_it_in_the_middle_and_ends_at_zero(rounds, rate):
    training = TrainingConfig(rate=rate, schedule="cosine")
    assert recipe_of(training).rate_at(rounds, 0) == rate
    assert recipe_of(training).rate_at(rounds, rounds / 2) == pytest.approx(rate / 2)
    assert recipe_of(training).rate_at(rounds, rounds) == pytest.approx(0, abs=1e-12)
    assert recipe_of(training).rate_at(rounds, rounds + 5) == pytest.approx(0, abs=1e-12)  # and does not rise again


@given(st.integers(1, 100), st.floats(0, 1), st.floats(0, 1))
def test_cosine_never_rises_and_constant_never_moves(rounds, early, late):
    early, late = sorted((early * rounds, late * rounds))
    cosine, constant = TrainingConfig(rate=0.5, schedule="cosine"), TrainingConfig(rate=0.5, schedule="constant")
    assert recipe_of(cosine).rate_at(rounds, early) >= recipe_of(cosine).rate_at(rounds, late) >= 0
    assert recipe_of(constant).rate_at(rounds, late) == 0.5


def test_one_seed_gives_one_result_bit_for_bit():
    (outcome, state), (again, same) = learned(configured()), learned(configured())
    assert outcome == again
    assert digest(state) == digest(same)


def test_the_order_of_images_depends_on_the_seed_the_round_and_the_site():
    config = configured()
    first = torch.cat(watched(config)[0].labels)
    assert torch.equal(torch.cat(watched(config)[0].labels), first)
    assert not torch.equal(torch.cat(watched(config, round=2)[0].labels), first)
    site, images = config.roster[0], site_examples(config, config.roster[0])
    for other, named in [(configured("seed=1"), site), (config, dataclasses.replace(site, name="site-0001"))]:
        at_work = Watched(session(config))
        learn(at_work, images, resolve(other), named, 1, CPU)
        assert not torch.equal(torch.cat(at_work.labels), first)


def test_global_randomness_is_neither_used_nor_moved():
    config, site = configured(), configured().roster[0]
    states = []
    for seed in (1, 2):
        at_work = session(config)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        learn(at_work, site_examples(config, site), resolve(config), site, 1, CPU)
        assert torch.equal(torch.get_rng_state(), before)
        states.append(digest(at_work.contribution()[ROUND]))
    assert states[0] == states[1]


def test_the_loss_falls_on_real_digits():
    first, _ = learned(configured())
    later, _ = learned(configured("training.epochs=20"))
    assert later.loss < 0.8 * first.loss
    assert later.samples == first.samples == 70


def test_each_epoch_sees_every_image_once_as_it_is():
    at_work, images = watched(configured("training.epochs=2", "training.batch=32"))
    assert [len(batch) for batch in at_work.images] == [32, 32, 6] * 2
    for epoch in (at_work.images[:3], at_work.images[3:]):
        seen = torch.cat(epoch).flatten(1)
        assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, to_float(images.x).flatten(1).tolist()))


def mirrored(config: Config) -> tuple[int, int]:
    """How many of the images that were shown are not as they were, and how many are neither that nor mirrored."""
    at_work, images = watched(config)
    straight = {tuple(row) for row in to_float(images.x).flatten(1).tolist()}
    turned = {tuple(row) for row in to_float(images.x).flip(-1).flatten(1).tolist()}
    seen = [tuple(row) for row in torch.cat(at_work.images).flatten(1).tolist()]
    return sum(row not in straight for row in seen), sum(row not in straight | turned for row in seen)


def test_steps_continue_over_as_many_passes_as_they_need_and_are_whole_passes_otherwise():
    config = load("digits", ["training.batch=30", "training.epochs=2", "sites=[{domain: digits, samples: 70}]"])
    site, images = config.roster[0], site_examples(config, config.roster[0])

    def sizes(steps: int) -> list[int]:
        training = dataclasses.replace(config.training, steps=steps)
        changed = dataclasses.replace(config, training=training)
        return [len(labels) for _, _, labels in batches(images, resolve(changed), site, 1, CPU)]

    assert sizes(0) == sizes(6) == [30, 30, 10, 30, 30, 10]
    assert sizes(2) == [30, 30] and sizes(7) == [30, 30, 10, 30, 30, 10, 30]


REACHES_1 = ("network={name: resnet10, width: 0.1}", "data.size=8", "training.batch=23", "training.epochs=2")  # of 70 images


def test_a_last_batch_of_one_is_left_out_where_batchnorm_takes_two():
    def sizes(*words: str) -> list[int]:
        config = load("digits", ["sites=[{domain: digits, samples: 70}]", *REACHES_1, *words])
        site, images = config.roster[0], site_examples(config, config.roster[0])
        return [len(labels) for _, _, labels in batches(images, resolve(config), site, 1, CPU)]

    assert sizes() == [23, 23, 23] * 2
    assert sizes("training.steps=4") == [23, 23, 23, 23]
    assert sizes("training.batch=34") == [34, 34, 2] * 2
    for fine in ("data.size=32", "network={name: resnet10, width: 0.1, norm: group}"):
        assert sizes(fine) == [23, 23, 23, 1] * 2
    config = load("digits", ["sites=[{domain: digits, samples: 70}]", *REACHES_1])
    site = config.roster[0]
    at_work = FedAvg().session(Task(resolve(config), site, 1, 1, architecture_of(config).build().train(),
                                    {MEAN: initial_state(config)}, lambda: None, torch.Generator()))  # fmt: skip
    assert learn(at_work, site_examples(config, site), resolve(config), site, 1, CPU).samples == 70
    assert at_work.steps == step_count(70, resolve(config)) == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "key"),
    [(["training.batch=1"], r"training\.batch: site-0000 has"),
     (["sites=[{domain: digits, samples: 1, partition: {min_samples: 1}}]"], r"partition\.min_samples: site-0000 has 1")],
)  # fmt: skip
def test_a_site_without_a_batch_that_batchnorm_takes_is_refused_at_the_start(words: list[str], key: str):
    with pytest.raises(UserError, match=key):
        check(load("digits", [*REACHES_1, "strategy.name=fedavg", "objective={name: fedavg}", "baselines=[]", *words]))


def test_images_are_mirrored_only_where_the_site_asks_for_it():
    assert mirrored(configured("training.epochs=4")) == (0, 0)
    flipped, odd = mirrored(configured("training.epochs=4", "sites.0.flip=true"))
    assert odd == 0
    assert 0.35 * 280 < flipped < 0.65 * 280
    assert mirrored(configured("training.epochs=4", "sites.1.flip=true")) == (0, 0)


def test_the_rate_falls_within_a_round_and_ends_at_zero():
    """In the last round the last steps are nearly nothing: half of the steps move the weights by far more than half."""
    config = configured("training.momentum=0", "training.rate=0.1", "training.batch=7", "rounds=1")
    images = site_examples(config, config.roster[0])
    at_work = session(config)
    trail: list[Tensor] = []

    class Trail(Watched):
        def loss(self, images: Tensor, labels: Tensor) -> Tensor:
            trail.append(torch.cat([one.detach().flatten() for one in self.parameters()]))
            return super().loss(images, labels)

    learn(Trail(at_work), images, resolve(config), config.roster[0], 1, CPU)
    trail.append(torch.cat([one.detach().flatten() for one in at_work.parameters()]))
    steps = [float((after - before).norm()) for before, after in itertools.pairwise(trail)]
    assert len(steps) == 10
    assert steps[-1] < 0.1 * steps[0]


def test_a_clipped_step_is_no_longer_than_rate_times_clip():
    config = configured("training.momentum=0", "training.rate=0.5", "training.clip=0.01", "training.batch=70")
    _, state = learned(config)
    start = initial_state(config)
    moved = math.sqrt(sum(float((state[name] - start[name]).square().sum()) for name in start))
    assert moved == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_divergence_names_the_site_the_round_and_the_option():
    # without weight standardisation, whose output no weight can blow up
    config = configured("training.rate=1e30", "training.batch=8", "network.standardise=false", "network.affine=true")
    with pytest.raises(DivergedError, match=r"site-0000: the loss is (nan|inf) in round 1; try a smaller training\.rate"):
        learned(config)


def test_a_network_that_is_not_finite_is_not_blamed_on_the_rate_alone():
    config, site = configured(), configured().roster[0]
    at_work = session(config)
    next(iter(at_work.parameters())).data.fill_(float("nan"))
    with pytest.raises(DivergedError, match="site-0000: the first loss of round 1 is nan; check what the server sends, or"):
        learn(at_work, site_examples(config, site), resolve(config), site, 1, CPU)


def test_a_loss_that_is_not_a_single_number_is_refused():
    config = configured()
    odd, images = session(config), site_examples(config, config.roster[0])
    odd.loss = lambda images, labels: images.mean(dim=(1, 2, 3))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"^the loss of a batch has the shape \[32\]; return one number"):
        learn(odd, images, resolve(config), config.roster[0], 1, CPU)
