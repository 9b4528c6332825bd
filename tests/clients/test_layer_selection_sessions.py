"""Layer selection at a site: warming up with all layers shared, and an E-step on images that nobody trains on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedloom.clients.data import site_examples, to_float
from fedloom.clients.networks import architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import Task, objective_of, resolve
from fedloom.clients.objectives.layer_selection.session import CHOSEN, COUNTS, MASS, SELECTION, SelectionSession
from fedloom.clients.protocol.messages import MEAN
from fedloom.clients.training.learner import learn
from fedloom.conf import Config
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.state import State
from tests.server.arithmetics import one_core
from tests.server.selections import configured

LAYER = "extractor.block1.0.weight"


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def session_of(config: Config, round: int, stored: State | None = None, shared: State | None = None) -> SelectionSession:
    site = config.roster[0]
    incoming = {MEAN: shared} if shared else {}
    network = architecture_of(config, site).build().train()
    draw = torch_generator(0, "test", str(round))
    found = objective_of(config).session(Task(resolve(config), site, round, 3, network, incoming, lambda: stored, draw))
    assert isinstance(found, SelectionSession)
    return found


def trained(session: SelectionSession, round: int) -> SelectionSession:
    config, site = session.task.config, session.task.site
    learn(session, site_examples(config, site), resolve(config), site, round, torch.device("cpu"))
    return session


def test_layers_of_the_user_start_where_the_warm_up_ends(tmp_path: Path):
    config = configured(tmp_path, "objective.warm_up=1", "training.rate=0.1")
    drawn = initial_state(config, config.roster[0].name, config.roster[0])
    first = trained(session_of(config, 1), 1)
    assert first.contribution()[SELECTION][MASS].tolist() == first.contribution()[SELECTION][CHOSEN].tolist() == [1.0, 1.0]
    after, elsewhere = first.local_state(), {name: one.detach() + 1.0 for name, one in first.shared.items()}
    second = session_of(config, 2, after, elsewhere)
    for name, one in second.network.named_parameters():
        goal = elsewhere.get(name, drawn[name])
        assert torch.equal(one, goal) == (name in elsewhere)  # the head is the site's own, and trained
    assert after is not None and not after[COUNTS].any()
    trained(second, 2)
    last = second.local_state()
    assert last is not None and float(last[COUNTS].sum()) == 6  # an E-step for each of its steps
    third = session_of(config, 3, last, elsewhere)
    assert not torch.equal(third.network.state_dict()[LAYER], elsewhere[LAYER])  # what it trained stays


def test_a_given_configuration_warms_up_as_a_learned_one_does(tmp_path: Path):
    config = configured(tmp_path, "objective.warm_up=1", "objective.mode=none", "training.rate=0.1")
    first = trained(session_of(config, 1), 1)
    assert first.contribution()[SELECTION][MASS].tolist() == [1.0, 1.0]
    elsewhere = {name: one.detach() + 1.0 for name, one in first.shared.items()}
    second = session_of(config, 2, first.local_state(), elsewhere)
    assert torch.equal(second.network.state_dict()[LAYER], elsewhere[LAYER])
    trained(second, 2)
    assert second.contribution()[SELECTION][MASS].tolist() == [0.0, 0.0]
    assert torch.equal(second.shared[LAYER], elsewhere[LAYER])  # nobody shares it, so it stays
    third = session_of(config, 3, second.local_state(), elsewhere)
    assert torch.equal(third.network.state_dict()[LAYER], second.network.state_dict()[LAYER])  # what it trained stays


def test_without_a_warm_up_own_layers_start_as_the_sites_name_draws_them(tmp_path: Path):
    config = configured(tmp_path)
    session, drawn = session_of(config, 1), initial_state(config, "site-0000", config.roster[0])
    assert torch.equal(session.network.state_dict()[LAYER], drawn[LAYER])
    assert not torch.equal(session.shared[LAYER], drawn[LAYER])


def test_images_for_the_expectation_step_are_never_trained_on_and_stay_the_same(tmp_path: Path):
    config = configured(tmp_path, "objective.held_out=0.25", "objective.m_steps=2")
    images = site_examples(config, config.roster[0])
    session, other = session_of(config, 1), session_of(config, 2)
    kept, again = session.training_examples(images), other.training_examples(images)
    assert session.evidence is not None and other.evidence is not None
    assert torch.equal(kept.x, again.x) and torch.equal(session.evidence[0], other.evidence[0])
    assert len(kept) == 45 and len(session.evidence[1]) == 15
    together = torch.cat([to_float(kept.x), session.evidence[0]]).flatten(1)
    assert torch.equal(together.sort(0).values, to_float(images.x).flatten(1).sort(0).values)
    session.loss(to_float(kept.x[:10]), kept.y[:10])
    found = session.belief.counts.clone()
    session.loss(to_float(kept.x[10:20]), kept.y[10:20])  # the posterior holds
    assert float(found.sum()) == 1 and torch.equal(session.belief.counts, found)


@pytest.mark.parametrize("search", ["exact", "pruned", "sampled"])
def test_the_posterior_is_that_of_the_images_held_out(search: str, tmp_path: Path):
    words = ["objective.held_out=0.25", f"objective.search={{name: {search}}}", "objective.likelihood=joint"]
    config = configured(tmp_path, *words)
    images = site_examples(config, config.roster[0])
    session = session_of(config, 1)
    kept = session.training_examples(images)
    assert session.evidence is not None
    inputs, labels = session.evidence
    weights, every = session.layers.weights(session.shared, session.added), session.belief.configurations
    with torch.no_grad():
        scores = session.tree.scores(every, weights, inputs)[..., session.outputs]
    likelihood = scores.log_softmax(-1)[:, torch.arange(len(labels)), labels].sum(1)
    session.loss(to_float(kept.x[:10]), kept.y[:10])
    assert session.pace.posterior is not None
    torch.testing.assert_close(session.pace.posterior, torch.softmax(likelihood.double(), 0))
