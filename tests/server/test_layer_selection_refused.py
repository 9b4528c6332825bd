"""Layer selection: replies that cannot be true are dropped, and what cannot work is refused before anything starts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message

from fedloom.clients.objectives import resolve
from fedloom.clients.objectives.layer_selection.session import CHOSEN, COUNTS, MASS, SELECTION
from fedloom.clients.protocol.messages import RIGHT, SITE, TOTAL, TRAIN, read_order
from fedloom.conf.errors import UserError
from fedloom.server.run.checks import check
from fedloom.server.strategies.base import strategy_of
from fedloom.sims.benchmarks.soak_replies import changed, entry, metrics
from tests.server.arithmetics import one_core
from tests.server.parts import Recorder
from tests.server.selections import LAYERS, OTHER, RESNET, Noting, configured, found, run, selection_of


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


HOSTILE = {
    "mass above 1": (selection_of(lambda state: {**state, MASS: torch.tensor([1.5, 0.2])}), "probabilities from 0 to 1"),
    "mass below 0": (selection_of(lambda state: {**state, MASS: torch.tensor([0.5, -0.1])}), "probabilities from 0 to 1"),
    "mass NaN": (selection_of(lambda state: {**state, MASS: torch.tensor([float("nan"), 0.2])}), "not finite"),
    "no configuration": (selection_of(lambda state: {**state, CHOSEN: torch.tensor([0.5, 1.0])}), "zeros and ones"),
    "configuration of -1": (selection_of(lambda state: {**state, CHOSEN: torch.tensor([-1.0, 1.0])}), "zeros and ones"),
    "negative counts": (selection_of(lambda state: {**state, COUNTS: -state[COUNTS]}), "numbers of at least 0"),
    "counts of another kind": (selection_of(lambda state: {**state, COUNTS: state[COUNTS].float()}), "expected int64"),
    "huge counts": (selection_of(lambda state: {**state, COUNTS: state[COUNTS] + 2**62}), "counts"),
    "too many groups": (selection_of(lambda state: {**state, MASS: torch.ones(3)}), "shape [3], expected [2]"),
    "nothing chosen": (selection_of(lambda state: {MASS: state[MASS], COUNTS: state[COUNTS]}), "lacks the tensor 'chosen'"),
    "parameters NaN": (changed(SITE, entry(f"{LAYERS[0]}.bias", float("nan"))), "not finite"),
    "another layer": (changed(SITE, lambda state: {**state, "head.weight": torch.ones(2)}), "unknown tensor 'head.weight'"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_replies_are_dropped_and_the_run_continues(tmp_path: Path, what: str) -> None:
    fault, message = HOSTILE[what]
    heard = Recorder()
    done = run(configured(tmp_path, "objective.prior=tasks"), Noting(fault, 1, (1,)), heard)
    assert [record["replies"] for record in heard.records] == [2, 3]
    [reason] = heard.records[0]["dropped"].values()
    assert message in reason
    assert done.summary["status"] == "finished" and all(done.summary["checks"].values())
    assert found(done)["own"] == [[1, 2], [2, 2], [1, 2]] and found(done)["shared"][1][0] == [None, None]


def test_what_no_sum_can_take_leaves_no_trace(tmp_path: Path) -> None:
    fault = changed(SITE, entry(f"{LAYERS[0]}.bias", 1e9))
    words = ["federation.largest_weight=0", "federation.largest_change=0"]
    heard = Recorder()
    done = run(configured(tmp_path, *words), Noting(fault, 1, (1,)), heard)
    assert list(heard.records[0]["dropped"]) == ["site-0001"]
    assert found(done)["shared"][1][0] == [None, None] and found(done)["own"][1] == [2, 2]


class Boasting(Noting):
    """The real ClientApp; its second site claims more right answers than it has images."""

    def __call__(self, message: Message, context: Context) -> Message:
        reply = super().__call__(message, context)
        if message.metadata.message_type == TRAIN or read_order(message.content).site != 1:
            return reply
        return metrics(**{RIGHT: 61, TOTAL: 60})(reply)


def test_accuracies_that_cannot_be_do_not_count(tmp_path: Path) -> None:
    done = run(configured(tmp_path), Boasting())
    assert [[one is None for one in row] for row in found(done)["accuracy"]] == [[False] * 2, [True] * 2, [False] * 2]
    assert "digits_c2-3" not in done.summary["accuracy"]["personal"]


def test_a_site_counts_no_more_than_it_can_have_seen(tmp_path: Path) -> None:
    """Once a site could rule the others' prior."""
    fault = selection_of(lambda state: {**state, COUNTS: torch.tensor([1000, 0, 0, 3000])})
    done = run(configured(tmp_path, "objective.prior=tasks"), Noting(fault, 1, (1,)))
    honest = done.client.of(2, 1)[1][SELECTION][COUNTS]
    sent = done.client.of(0, 2)[0][COUNTS][COUNTS]
    assert torch.equal(sent.long() - honest, torch.tensor([1, 0, 0, 4]))  # of 6 steps


@pytest.mark.parametrize(("words", "message"), [
    (["objective.limit=1"], "objective.groups: 2 groups of layers have 4 configurations, but objective.limit=1 allows 2; "
                            "group the 2 layers, as in groups=[2]"),
    ([RESNET, "evaluation.statistics=batch"], "limit=10 allows 1024; group the 19 layers, as in groups=[5, 5, 5, 4]"),
    (["objective.groups=[1,2]"], "objective.groups: 1 + 2 = 3, but there are 2 layers: extractor.block1.0, "),
    ([RESNET, "evaluation.statistics=batch", "objective.groups=[2,6,6,5]"],
     "cannot be cut between extractor.stage1.0.branch.0 and extractor.stage1.0.branch.3"),
    (["network={name: exits}"], "network: cannot be cut"),
    (["objective.groups=[0,2]"], "objective.groups: got 0, takes a number of at least 1"),
    (["objective.mode='010'"], "objective.mode: '010' has 3 digits, but there are 2 groups of layers"),
    (["objective.mode=010"], "objective.mode: '010' has 3 digits, but there are 2 groups of layers"),
    (["objective.mode=top-3"], "top-K, bottom-K (K from 1 to 2), or groups by number, as in only-1-2"),
    (["objective.mode=all", "baselines=[none,bottom-7]"], "got 'bottom-7'"),
    (["objective.mode=nix", "objective.certainty=0.5"], "objective.mode: got 'nix'"),
    (["baselines=[nix]"], "got 'nix'"),
    (["objective.layers=[extractor.block9]"], "unknown objective.layers 'extractor.block9'"),
    (["objective.learner.name=nix"], "unknown base learner 'nix' (known: df_cnn, hps, tf)"),
    (["objective.search.name=nix"], "unknown search 'nix' (known: exact, pruned, sampled)"),
    (["objective.search={name: sampled, draws: 0}"], "objective.search.draws: got 0, takes a number of at least 1"),
    (["objective.prior=nix"], "objective.prior: got 'nix', takes one of: counts, posteriors, tasks"),
    (["objective.m_steps=0"], "objective.m_steps: got 0"),
    (["objective.certainty=0"], "objective.certainty: got 0.0"),
    (["objective={name: local}"], "objective.name: got 'local', strategy layer_selection takes layer_selection"),
    (["strategy.arrival=nix"], "strategy.arrival: got 'nix', takes one of: together, lifelong"),
    (["network={name: mlp, widths: []}"], "layers before the head; choose a network"),
    (["network={name: mlp, widths: [8]}", "objective.learner.name=df_cnn"], "'extractor.1' has weights 8 x 64"),
    ([OTHER % ("[4, 7]", "none")], "block2.0.weight' is 7 x 4 x 3 x 3 at site-0001 and 6 x 4 x 3 x 3 at site-0000"),
    ([OTHER % ("[4, 6, 6]", "none")], "'extractor.block3.0.weight' is 6 x 6 x 3 x 3 at site-0001 and none at site-0000"),
    ([OTHER % ("[4, 6]", "batch"), "evaluation.statistics=running"], "evaluation.statistics: got 'running'"),
    (["federation.partial_sums=true"], "federation.partial_sums: workers can add up only one sum"),
    (["training.loss={name: focal}"], "{'name': 'focal'}, but layer selection trains by cross-entropy"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        config = configured(tmp_path, *words)
        strategy_of(resolve(config))
        check(config)
    assert "\n" not in str(caught.value)


def test_a_certainty_without_a_configuration_is_reported(tmp_path: Path) -> None:
    """Once it was passed over in silence."""
    config = configured(tmp_path, "objective.certainty=0.5")
    [warning] = strategy_of(resolve(config)).warnings(resolve(config))
    assert warning.startswith("objective.certainty=0.5 needs a fixed configuration")
    for words in (["objective.mode=all"], ["baselines=[all]"]):
        config = configured(tmp_path, "objective.certainty=0.5", *words)
        assert not strategy_of(resolve(config)).warnings(resolve(config))
