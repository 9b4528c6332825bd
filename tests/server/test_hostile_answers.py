"""Hostile answers to what methods for different networks ask beside training: none ends a run, none enters a sum unseen."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from fedloom.clients.app import app
from fedloom.clients.objectives.components.objective import PUBLISH, RECOMBINE
from fedloom.clients.objectives.fedproto import COUNTS, PROTOTYPES, SUMS
from fedloom.clients.objectives.heterofl import HELD, LABELS
from fedloom.clients.protocol.messages import COMPONENTS, METRICS, ORDER, read_order
from fedloom.conf import load
from fedloom.fusion.state import State
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import Participation
from tests.server.arithmetics import one_core
from tests.server.parts import Given, Run, given, set_up, small, started
from tests.server.test_cla_ot import configured

Change = Callable[[State], State]
LIAR = "site-0001"
SITES = "{domain: digits, count: 3, samples: 60, classes: [0, 1, 2, 3]}"
NAN = float("nan")


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


class LyingApp(ClientApp):
    """The real ClientApp; the second site's answers to one kind of question are changed, or (None) never come."""

    def __init__(self, kind: str, change: Change | None, rounds: Sequence[int]) -> None:
        super().__init__()
        self.kind, self.change, self.rounds = kind, change, rounds

    def __call__(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        order = read_order(message.content) if ORDER in message.content.config_records else None
        if order is None or (order.kind, order.site) != (self.kind, 1) or order.round not in self.rounds:
            return reply
        if self.change is None:
            raise RuntimeError("the site hangs")
        record = {PUBLISH: COMPONENTS}.get(self.kind, self.kind)
        state = self.change(dict(reply.content.array_records[record].to_torch_state_dict()))
        reply.content[record] = ArrayRecord(torch_state_dict=state)  # type: ignore[arg-type]
        return reply


def played(root: Path, method: str, kind: str, change: Change | None, rounds: Sequence[int]) -> Run:
    """Three rounds of three sites, one of which lies in some of them."""
    words = [f"strategy={{name: {method}}}", f"objective={{name: {method}}}", "network={name: mlp, widths: [6, 4]}"]
    config = configured(root, *words, "data.classes=10", "rounds=3", sites=SITES)
    return set_up(config, LyingApp(kind, change, rounds)).all_rounds()


def all_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda state: {name: change(tensor) for name, tensor in state.items()}


FALSE = {
    "NaN": (all_of(lambda tensor: tensor * NAN), "entries that are not finite"),
    "huge": (all_of(lambda tensor: tensor + 1e30), "more than federation.largest_weight=10000"),
    "another shape": (all_of(lambda tensor: tensor[:1]), "expected [10"),
    "another name": (lambda state: {**state, "x": torch.ones(1)}, "has an unknown tensor 'x'"),
    "whole numbers": (all_of(lambda tensor: tensor.long()), "expected floating point"),
    "silence": (None, "the site hangs"),
}
LABEL_LIES = {
    "no label at all": (all_of(lambda tensor: tensor * 0.0), "at least one 1"),
    "a share of labels": (all_of(lambda tensor: tensor / 2), "must be 1 for labels that a site has"),
    "negative labels": (all_of(lambda tensor: -tensor), "must be 1 for labels that a site has"),
}


@pytest.mark.parametrize("lie", [*FALSE, *LABEL_LIES])
def test_a_lie_about_labels_drops_the_site_and_no_other(tmp_path, lie):
    """Once the run ended in round 2, when the liar alone was asked again."""
    change, message = {**FALSE, **LABEL_LIES}[lie]
    run = played(tmp_path, "heterofl", LABELS, change, rounds=[1, 2])
    assert [list(record["dropped"]) for record in run.listener.records] == [[LIAR], [LIAR], []]
    assert message in run.listener.records[1]["dropped"][LIAR]
    assert all(run.aggregate.checks()[0].values())


def test_a_site_that_claims_labels_of_others_has_its_share_of_their_rows_and_no_more(tmp_path):
    run = played(tmp_path, "heterofl", LABELS, all_of(torch.ones_like), rounds=[1, 2, 3])
    assert all(record["dropped"] == {} for record in run.listener.records)
    [rows] = [slot for slot in run.aggregate.slots.declared if slot.startswith("rows.")]
    shares = run.aggregate.view().mean(rows)[HELD]
    assert shares.tolist() == pytest.approx([1.0] * 4 + [1 / 3] * 6)
    run.aggregate.membership.forget([LIAR], {})
    assert run.aggregate.view().mean(rows)[HELD].tolist() == [1.0] * 4 + [0.0] * 6


def test_what_checks_a_record_sees_finite_numbers_alone(tmp_path):
    """Linear algebra on others once ended a round with an error of its own."""
    site = (config := small(tmp_path)).roster[0]
    like, seen, exchange = {"x": torch.zeros(2)}, [], Given([given(site, {"sent": {"x": torch.tensor([0.0, NAN])}})])
    run = started(config).round_context(1, Participation([site], 1), exchange)
    assert list(run.ask("sent", {}, {"sent": RecordSpec(like, check=seen.append)}, needed=False)) == seen == []
    assert exchange.dropped == {site.name: "tensor 'x' has entries that are not finite"}


def of_counts(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda state: {**state, COUNTS: change(state[COUNTS])}


def of_sums(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda state: {**state, SUMS: change(state[SUMS])}


PROTOTYPE_LIES = {
    "images instead of shares": (of_counts(lambda counts: counts * 60), "'counts' must be shares of 60 images"),
    "no images": (all_of(lambda tensor: tensor * 0.0), "'counts' must be shares of 60 images"),
    "negative shares": (of_counts(lambda counts: counts - torch.eye(10)[0] + torch.eye(10)[9]), "'counts' must be shares"),
    "a millionth of an image": (of_counts(lambda counts: counts + 1e-9), "'counts' must be shares of 60 images"),
    "features of no images": (of_sums(lambda sums: sums + 1.0), "'sums' has features of a class without images"),
    "features beyond the bound": (
        of_sums(lambda sums: sums.any(1, True) * torch.full((10, 4), 9e3)),
        "a feature larger than",
    ),
}


@pytest.mark.parametrize("lie", [*FALSE, *PROTOTYPE_LIES])
def test_a_lie_about_prototypes_drops_the_site_and_harms_no_other(tmp_path, lie):
    """Sums and counts in different units once gave prototypes at which the others' training burst."""
    change, message = {**FALSE, **PROTOTYPE_LIES}[lie]
    run = played(tmp_path, "fedproto", PROTOTYPES, change, rounds=[1, 2])
    assert [list(record["dropped"]) for record in run.listener.records] == [[LIAR], [LIAR], []]
    assert message in run.listener.records[0]["dropped"][LIAR]
    assert max(record["train_loss"] for record in run.listener.records) < 3.0
    assert all(run.aggregate.checks()[0].values())


def test_honest_prototypes_in_half_precision_count(tmp_path):
    run = played(tmp_path, "fedproto", PROTOTYPES, all_of(torch.Tensor.half), rounds=[1, 2, 3])
    assert all(record["dropped"] == {} for record in run.listener.records)


NAMED = "extractor.block2.0.weight"
PUBLISHED_LIES = {
    "NaN": (all_of(lambda tensor: tensor * NAN if tensor.is_floating_point() else tensor), "entries that are not finite"),
    "huge": (all_of(lambda tensor: tensor + 1e30 if tensor.is_floating_point() else tensor), "more than federation.largest"),
    "a piece": (lambda state: {NAMED: state[NAMED]}, "holds an incomplete extractor"),
    "another name": (lambda state: {**state, "extractor.x": torch.ones(1)}, "has an unknown tensor 'extractor.x'"),
    "silence": (None, "the site hangs"),
}
CUT = "network={name: split, of: {name: convnet, widths: [4, 4], strides: [1, 1]}, at: block2, channels: 0}"


class MiscountingApp(LyingApp):
    """The same, whose numbers are changed: those of right answers, and all others."""

    def __init__(self, right: float, total: float) -> None:
        super().__init__(RECOMBINE, lambda state: state, [2])
        self.numbers = right, total

    def __call__(self, message: Message, context: Context) -> Message:
        reply = app(message, context)
        order = read_order(message.content) if ORDER in message.content.config_records else None
        if order is not None and (order.kind, order.site) == (RECOMBINE, 1):
            right, total = self.numbers
            metrics = MetricRecord()
            for name in reply.content.metric_records[METRICS]:
                metrics[name] = right if name.startswith("right") else total
            reply.content[METRICS] = metrics
        return reply


def published(root: Path, kind: str, change: Change | None, client: ClientApp | None = None) -> Run:
    """Two rounds of three sites, one of which lies when all are asked for their components, or how good heads are."""
    words = [CUT, "data.grey=true", "training={steps: 1, batch: 10}", "baselines=[]", "rounds=2", "data.size=8"]
    words += ["engine.name=inline", f"run.root={root}", "data.test_limit=30", "data.validation_limit=20"]
    config = load("components", [f"sites=[{SITES}]", *words])
    return set_up(config, client or LyingApp(kind, change, [2])).all_rounds()


@pytest.mark.parametrize("lie", PUBLISHED_LIES)
def test_a_lie_in_what_is_published_keeps_the_site_out_of_the_catalogue_and_no_other(tmp_path, lie):
    change, message = PUBLISHED_LIES[lie]
    run = published(tmp_path, PUBLISH, change)
    assert message in run.listener.records[1]["dropped"][LIAR]
    assert list(run.aggregate.models()) == ["site-0000", "site-0002"]


def test_a_site_that_keeps_its_components_is_not_a_liar(tmp_path):
    run = published(tmp_path, PUBLISH, lambda state: {})
    assert run.listener.records[1]["dropped"] == {} and LIAR not in run.aggregate.models()


def test_a_site_that_does_not_say_how_good_heads_are_has_an_empty_row(tmp_path):
    run = published(tmp_path, RECOMBINE, None)
    images = run.aggregate.view().server_state("recombination")["images"]
    assert int(images[1].sum()) == 0 and int(images[0].sum()) > 0 and int(images[:, 1].sum()) > 0


@pytest.mark.parametrize(("right", "total"), [(11, 10), (-1, 10), (0.5, 0.9), (1e25, 1e26), (2**62, 2**62), (NAN, 10)])
def test_numbers_that_cannot_be_leave_the_row_of_their_site_empty_and_end_no_run(tmp_path, right, total):
    """Once 1e25 ended the run, and 2**62 images stood in the matrix."""
    run = published(tmp_path, RECOMBINE, None, MiscountingApp(right, total))
    images = run.aggregate.view().server_state("recombination")["images"]
    assert [bool(row.any()) for row in images] == [True, False, True]
