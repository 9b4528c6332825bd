"""What a site may send to end a run, to enter the sum unseen, or to get at what is not its own: none of it does."""

import re
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fedloom.clients import work
from fedloom.clients.app import app
from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.job import Job
from fedloom.clients.protocol.messages import BY_CLASS, LOST, METRICS, ORDER, OWN, RIGHT, ROUND, SITE, TOTAL
from fedloom.clients.protocol.reply_checks import ReplyError, check_score
from fedloom.clients.work import train
from fedloom.conf import UserError, load
from fedloom.server.rounds.nodes import InMemoryBindings
from fedloom.server.run.training_run import one_round
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.benchmarks.soak_replies import ANSI, LAYER, LOST_STATE, PARTIALS, REFUSED, changed, edited, entry, raising
from tests.server.parts import WatchedApp, set_up, small, sum_of_contributions


@pytest.mark.parametrize("sums", [True, False], ids=["sums on", "sums off"])
@pytest.mark.parametrize("what", PARTIALS)
def test_a_record_partial_of_a_site_means_nothing(tmp_path: Path, what: str, sums: bool):
    """Partial sums come from our own workers, beside the replies. (Once: KeyError, ValueError, or thousands of addends.)"""
    words = (f"federation.partial_sums={str(sums).lower()}", "rounds=2")
    clean = set_up(small(tmp_path / "clean", *words, samples=20)).all_rounds()
    client = WatchedApp(PARTIALS[what], place=1, rounds=(1, 2))
    run = set_up(small(tmp_path / "run", *words, samples=20), client).all_rounds()
    assert [record["dropped"] for record in run.listener.records] == [{}, {}]
    assert run.aggregate.digest() == clean.aggregate.digest()
    assert run.aggregate.checks()[0] == clean.aggregate.checks()[0]


def test_no_text_of_an_error_stops_a_run(tmp_path: Path):
    """Once "own state is lost" anywhere in a text did, with lost_store=stop."""

    cry = raising(f"site-0001: its own state is lost: {LOST}: that after round 1")
    config = small(tmp_path, "federation.lost_store=stop", "rounds=2", samples=20)
    run = set_up(config, WatchedApp(cry, place=1, rounds=(2,))).all_rounds()
    assert [list(record["dropped"]) for record in run.listener.records] == [[], ["site-0001"]]


def test_a_site_that_says_again_and_again_that_its_state_is_lost_is_dropped(tmp_path: Path):
    run = set_up(small(tmp_path, "rounds=3", samples=20), WatchedApp(LOST_STATE, place=1, rounds=(2, 3))).all_rounds()
    dropped = [record["dropped"] for record in run.listener.records]
    assert dropped == [{}, *[{"site-0001": "it lost its own state again"}] * 2]
    assert run.aggregate.digest()["sum"] == sum_of_contributions(run.aggregate)


def test_a_site_that_never_had_a_state_cannot_have_lost_it(tmp_path: Path):
    """With lost_store=stop this would end the run in its first round."""
    forget = edited(lambda content: [content.clear(), content.__setitem__(LOST, ConfigRecord({}))])
    config = small(tmp_path, "federation.lost_store=stop", "rounds=1", samples=20)
    run = set_up(config, WatchedApp(forget, place=1, rounds=(1,))).all_rounds()
    assert run.listener.records[0]["dropped"] == {"site-0001": "it reports a lost state, but has none yet"}


def test_what_steers_a_terminal_reaches_neither_records_nor_listeners(tmp_path: Path):
    run = set_up(small(tmp_path, "rounds=1", samples=20), WatchedApp(raising(ANSI), place=1, rounds=(1,))).all_rounds()
    (reason,) = run.listener.records[0]["dropped"].values()
    assert reason.isprintable()
    assert "red" in reason
    assert all(text.isprintable() for text in run.listener.messages)


def test_a_site_whose_code_leaves_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Once the run ended there, with exit code 0."""

    def leave(job: Job) -> RecordDict:
        if job.order.site == 1:
            raise SystemExit(0)
        return train(job)

    monkeypatch.setattr(work, "train", leave)
    run = set_up(small(tmp_path, "rounds=1", samples=20), app).all_rounds()
    dropped = run.listener.records[0]["dropped"]
    assert dropped.keys() == {"site-0001"}
    assert re.fullmatch(r"SystemExit: 0 \(test_hostile_replies\.py, line \d+, in leave\)", dropped["site-0001"])


def test_what_a_site_measures_is_whole_numbers_of_no_more_images_than_there_are():
    assert check_score(measured(right=3, total=4), "right") == Score(3, 4)
    assert check_score(measured(right=3, total=4, classes=([1, 0, 2], [1, 0, 3])), "right").classes == {0: (1, 1), 2: (2, 3)}
    for right, total in [(2.0, 4), (float("inf"), 1e25), (5, 4), (-1, 4), (1, 2**31 + 1), (0, 10**15)]:
        with pytest.raises(ReplyError):
            check_score(measured(right, total), "right")
    for classes in [([1], [4]), ([3], [5]), ([3, 0], [4]), ([4, -1], [4, 0]), ([3.0], [4.0]), ([1, 2], [0, 4])]:
        with pytest.raises(ReplyError, match="by class are impossible"):
            check_score(measured(3, 4, classes), "right")


def measured(right: float, total: float, classes: Any = None) -> RecordDict:
    numbers = {} if classes is None else {BY_CLASS + RIGHT: classes[0], BY_CLASS + TOTAL: classes[1]}
    return RecordDict({METRICS: MetricRecord({RIGHT: right, TOTAL: total, **numbers})})


def test_the_name_of_a_tensor_from_outside_is_reported_short_and_printable(tmp_path: Path):
    fault, _ = REFUSED["a name of 100 kB"]
    run = set_up(small(tmp_path, "rounds=1", samples=20), WatchedApp(fault, place=1, rounds=(1,))).all_rounds()
    (reason,) = run.listener.records[0]["dropped"].values()
    assert reason.isprintable()
    assert len(reason) <= 300
    assert "unknown tensor" in reason


@pytest.mark.parametrize(
    ("option", "fault", "message"),
    [
        ("largest_weight=5", changed(SITE, entry(LAYER, 6.0)), f"tensor '{LAYER}' has an entry of size 6,"),
        ("largest_weight=5", changed(ROUND, entry("head.bias", -6.0)), "record 'round', tensor 'head.bias'"),
        ("largest_change=5", changed(SITE, entry(LAYER, 6.0)), "record 'site' moved by"),
        ("largest_change=5", changed(ROUND, entry("head.bias", 6.0)), "record 'round' moved by"),
    ],
)
def test_the_bounds_are_the_configured_ones_and_the_reason_says_which(tmp_path: Path, option: str, fault: Any, message: str):
    run = set_up(
        small(tmp_path, f"federation.{option}", "rounds=1", samples=20), WatchedApp(fault, rounds=(1,))
    ).all_rounds()
    (reason,) = run.listener.records[0]["dropped"].values()
    assert message in reason
    assert reason.endswith(f"more than federation.{option}")


def test_without_bounds_everything_that_can_be_summed_counts(tmp_path: Path):
    free = ("federation.largest_weight=0", "federation.largest_change=0", "rounds=1")
    run = set_up(small(tmp_path, *free, samples=20), WatchedApp(changed(SITE, entry(LAYER, 1e6)), rounds=(1,))).all_rounds()
    assert run.listener.records[0]["dropped"] == {}


def test_another_bound_on_samples_takes_the_place_of_the_sites_own(tmp_path: Path):
    run = set_up(small(tmp_path, "federation.most_samples=10", "rounds=1", samples=20, sites=2))
    with pytest.raises(RuntimeError, match=r"claims 20 samples and has 10"):
        run.all_rounds()


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, 1e31])
def test_losses_whose_mean_would_be_none_are_refused(tmp_path: Path, loss: float):
    """Two sites ended a run with them, and each time that it was resumed."""
    fault = edited(lambda content: content.__setitem__(METRICS, MetricRecord({"loss": loss, "samples": 5})))
    run = set_up(small(tmp_path, "rounds=1", samples=20), WatchedApp(fault, place=1, rounds=(1,))).all_rounds()
    (reason,) = run.listener.records[0]["dropped"].values()
    assert "with a finite loss" in reason


def test_a_reply_that_answers_no_message_fails_at_once(tmp_path: Path):
    """It was waited for until the round's time was up."""
    run = set_up(small(tmp_path, "rounds=1", samples=20), WatchedApp(another, place=1, rounds=(1,))).all_rounds()
    (reason,) = run.listener.records[0]["dropped"].values()
    assert reason == "the ClientApp returned Message, which answers another one"


def another(reply: Message) -> Message:
    return Message(reply.content, reply.metadata.src_node_id, "train")


@pytest.mark.parametrize("given", ["[]", "{a: b}", "[[x]]"])
def test_a_strategy_whose_name_is_not_a_text_is_reported(given: str):
    for key in ("name", "weighting"):
        with pytest.raises(UserError, match=r"^unknown strategy '|^strategy\.weighting: got .*, takes one of"):
            with_default_objective(load("mnist_dirichlet", [f"strategy.{key}={given}"]))


def test_robust_aggregation_that_could_not_be_subtracted_is_refused(tmp_path: Path):
    from fedloom.server.run.checks import check

    for words in (["strategy={name: trimmed_mean}"], ["strategy.weighting=median"]):
        with pytest.raises(UserError, match=r"is not a sum, so no site could be subtracted.*federation\.largest_weight"):
            check(small(tmp_path, *words))


def test_a_contribution_goes_to_no_one_but_its_own_node(tmp_path: Path):
    """A node that took a site's place says that its state is lost, to be sent what the site gave."""
    forget = edited(lambda content: [content.clear(), content.__setitem__(LOST, ConfigRecord({}))])

    sent: list[set[str]] = []

    class Spy(WatchedApp):
        def __call__(self, message: Message, context: Any) -> Message:
            if ORDER in message.content.config_records:
                sent.append(set(message.content.array_records))
            return super().__call__(message, context)

    client = Spy(forget, place=1, rounds=(2, 3))
    run = set_up(small(tmp_path, "rounds=2", samples=20), client)
    one_round(run.loop, 1)
    run.loop.channel.enrolment.bindings = InMemoryBindings(
        {"site-0000": 2, "site-0001": 77}
    )  # another node gave what is there
    record = one_round(run.loop, 2)
    assert not any(OWN in records for records in sent)
    reason = record["dropped"]["site-0001"]
    assert "node 3 does not receive the contributions of node 77" in reason
    assert "site-0001 --node ID' chooses the site's node; these claim it: 3)" in reason
    # once the operator says so, it is
    run.loop.channel.enrolment.bindings = InMemoryBindings({"site-0001": 3})
    one_round(run.loop, 3)
    assert any("round 3" in text and "it starts again from its contribution" in text for text in run.listener.messages)
    assert sum(OWN in records for records in sent) == 1
