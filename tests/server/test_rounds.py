"""The round loop: one bad site never spoils a round, and nothing but the configuration decides the result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import MetricRecord
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.messages import METRICS
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State, digest
from fedloom.server.rounds.schedules import round_half_up
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.run.training_run import one_round
from fedloom.sims.benchmarks.soak_replies import RAISES, REFUSED
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import (
    LastFirstGrid,
    Run,
    WatchedApp,
    WindowGrid,
    committed,
    folder,
    on_disk,
    set_up,
    small,
    sum_of_contributions,
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> list[dict[str, State]]:
    """What three sites contribute in the first and in the second round, if nobody fails."""
    run = set_up(small(tmp_path_factory.mktemp("healthy"), "rounds=3", "evaluation.every=3", sites=3, samples=20))
    kept = []
    for round in (1, 2):
        one_round(run.loop, round)
        kept.append({site.name: run.aggregate.slots.contribution("sum", site.name) for site in run.aggregate.setup.sites})
    return kept


@pytest.mark.parametrize("what", REFUSED)
def test_a_faulty_site_is_dropped_with_its_reason_and_keeps_its_old_contribution(tmp_path: Path, healthy, what):
    fault, reason = REFUSED[what]
    client = WatchedApp(fault, place=1, rounds=(2,))
    run = set_up(small(tmp_path, "rounds=3", "evaluation.every=3", sites=3, samples=20), client)
    one_round(run.loop, 1)
    record = one_round(run.loop, 2)
    assert record["replies"] == 2
    assert list(record["dropped"]) == ["site-0001"]
    assert reason in record["dropped"]["site-0001"]
    messages = [text for text in run.listener.messages if "site-0001" in text]
    assert len(messages) == 1
    assert messages[0] == f"round 2: site-0001 dropped: {record['dropped']['site-0001']}"
    assert "\n" not in messages[0]
    assert [(name, ok) for name, ok, _ in run.listener.replies[3:]] == [
        ("site-0000", True),
        ("site-0001", False),
        ("site-0002", True),
    ]
    expected = ExactSum(run.aggregate.slots.bits)
    for contribution in (healthy[1]["site-0000"], healthy[0]["site-0001"], healthy[1]["site-0002"]):
        expected.add(contribution)
    assert run.aggregate.digest()["sum"] == digest(expected.totals)
    # and when it works again, it goes on from the round that counted
    assert one_round(run.loop, 3)["dropped"] == {}
    assert [(order.round, order.base) for order in client.orders if order.site == 1] == [(1, 0), (2, 1), (3, 1)]
    assert run.aggregate.digest()["sum"] == sum_of_contributions(run.aggregate)


def blobs(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: content for name, content in kept["files"].items() if name.startswith("blobs/")}


def test_too_few_replies_end_the_run_and_nothing_is_committed(tmp_path: Path):
    client = WatchedApp(RAISES, place=1, rounds=(2,))
    config = small(tmp_path, "federation.min_replies=3", sites=3, samples=20)
    run = set_up(config, client)
    one_round(run.loop, 1)
    before, kept = run.aggregate.digest(), on_disk(run.aggregate)
    first = r"first failure: site-0001: RuntimeError: first line the disk is on fire"
    line = rf"round 2: 2 good replies, federation\.min_replies=3 \({first}\)"
    with pytest.raises(TooFewRepliesError, match=line):
        one_round(run.loop, 2)
    assert run.aggregate.digest() == before
    assert committed(run.aggregate) == {key: kept[key] for key in ("rounds", "history", "events")}
    run.aggregate.ledger.prune()
    assert blobs(on_disk(run.aggregate)) == blobs(kept)
    assert len(run.listener.records) == 1
    # the round can be repeated, with the result that it would have had
    client.rounds = set()
    one_round(run.loop, 2)
    smooth = set_up(small(tmp_path / "smooth", sites=3, samples=20)).all_rounds()
    assert run.aggregate.digest() == smooth.aggregate.digest()
    assert digest(run.aggregate.aggregate().state) == digest(smooth.aggregate.aggregate().state)


def test_one_good_reply_is_enough_where_one_is_asked_for(tmp_path: Path):
    run = set_up(small(tmp_path, "rounds=1", samples=20), WatchedApp(RAISES, place=0, rounds=(1,))).all_rounds()
    assert run.listener.records[0]["replies"] == 1


def asked(run: Run, client: WatchedApp) -> list[list[int]]:
    rounds = range(1, run.config.rounds + 1)
    return [[order.site for order in client.orders if order.round == round] for round in rounds]


def sampled(root: Path, *overrides: str) -> list[list[int]]:
    client = WatchedApp()
    run = set_up(small(root, "federation.fraction=0.5", "rounds=3", *overrides, sites=6, samples=10), client)
    return asked(run.all_rounds(), client)


def test_sites_are_sampled_by_the_seed_anew_in_each_round(tmp_path: Path):
    first = sampled(tmp_path / "a")
    assert [len(set(sites)) for sites in first] == [3] * 3
    assert len({tuple(sites) for sites in first}) > 1
    assert sampled(tmp_path / "b") == first
    assert sampled(tmp_path / "c", "seed=1") != first


@pytest.mark.parametrize(("fraction", "number"), [(1e-9, 1), (0.2, 1), (0.5, 2), (0.6, 2), (0.9, 3), (1.0, 3)])
def test_the_share_of_sites_that_are_asked_is_rounded_half_up_and_never_nobody(tmp_path: Path, fraction, number):
    config = small(tmp_path, f"federation.fraction={fraction}", "rounds=1", sites=3, samples=10)
    client = WatchedApp()
    run = set_up(config, client).all_rounds()
    assert len(client.orders) == number == run.listener.asked[0]
    assert run.listener.records[0]["replies"] == number


@pytest.mark.parametrize(("number", "rounded"), [(0.49, 0), (0.5, 1), (1.5, 2), (2.5, 3), (2.49, 2)])
def test_halves_are_rounded_up(number, rounded):
    assert round_half_up(number) == rounded


def result(root: Path, *overrides: str, grid: type[InlineGrid] = InlineGrid) -> tuple[Any, ...]:
    """All that a run of four sites leaves, in digests and records, but for its times."""
    fraction = "federation.fraction=0.75"
    run = set_up(small(root, fraction, *overrides, sites=4, samples=20), grid=grid).all_rounds()
    records = [{key: item for key, item in record.items() if key != "seconds"} for record in run.listener.records]
    return run.aggregate.digest(), digest(run.aggregate.aggregate().state), records


@pytest.mark.parametrize("mode", ["exact", "regularised", "independent", "fedavg"])
def test_one_seed_gives_one_result_bit_for_bit_in_whatever_order_and_window_replies_come(tmp_path: Path, mode):
    mode = f"objective.mode={mode}"
    first = result(tmp_path / "a", mode)
    assert result(tmp_path / "b", mode, "federation.window=1") == first
    assert result(tmp_path / "c", mode, "federation.window=2", grid=LastFirstGrid) == first
    other = result(tmp_path / "d", mode, "seed=1")
    assert other[0] != first[0]
    assert other[1] != first[1]


def test_leave_one_out_means_do_not_make_a_run_irreproducible(tmp_path: Path):
    options = ("objective.subset_probability=0.5", "strategy.subsets=2")
    assert result(tmp_path / "a", *options) == result(tmp_path / "b", *options, grid=LastFirstGrid)


def test_torchs_and_numpys_global_seeds_change_nothing(tmp_path: Path):
    torch.manual_seed(1)
    first = result(tmp_path / "a")
    torch.manual_seed(2)
    assert result(tmp_path / "b") == first


@pytest.mark.parametrize("window", [1, 3])
def test_no_more_messages_are_under_way_than_the_window_allows(tmp_path: Path, window):
    config = small(tmp_path, f"federation.window={window}", "rounds=1", sites=6, samples=10)
    run = set_up(config, grid=WindowGrid).all_rounds()
    assert isinstance(run.grid, WindowGrid)
    assert run.grid.most == window
    assert run.listener.records[0]["replies"] == 6


def test_every_order_says_run_round_base_and_members_and_goes_to_its_own_site(tmp_path: Path):
    client = WatchedApp()
    run = set_up(small(tmp_path, sites=3, samples=20), client).all_rounds()
    assert [(order.site, order.round, order.base) for order in client.orders] == [
        *((site, 1, 0) for site in range(3)),
        *((site, 2, 1) for site in range(3)),
    ]
    assert {(order.run, order.members) for order in client.orders} == {("run", 3)}
    assert {path.name for path in (folder(run.config) / "sites" / "run").iterdir()} == {
        site.name for site in run.config.roster
    }


def test_accuracy_is_measured_when_told_and_after_the_last_round(tmp_path: Path):
    run = set_up(small(tmp_path, "rounds=5", "evaluation.every=2", sites=2, samples=10)).all_rounds()
    assert [record["round"] for record in run.listener.records if "accuracy" in record] == [2, 4, 5]
    for record in run.listener.records:
        for share in record.get("accuracy", {}).values():
            assert 0 <= share <= 1


def test_training_makes_the_aggregate_of_three_sites_better(tmp_path: Path):
    run = set_up(small(tmp_path, "rounds=4", "network.width=1", sites=3, samples=400)).all_rounds()
    losses = [record["train_loss"] for record in run.listener.records]
    accuracy = [record["accuracy"]["union"] for record in run.listener.records]
    assert losses[-1] < 0.5 * losses[0]
    assert accuracy[-1] > 0.8  # ten classes: chance is 0.1


def test_of_many_dropped_sites_ten_are_reported_one_by_one_and_all_are_recorded(tmp_path: Path):
    class Broken(ClientApp):
        def __call__(self, message, context):
            if message.metadata.message_type == "train" and context.node_config["partition-id"]:
                raise RuntimeError("broken")
            return WatchedApp()(message, context)

    run = set_up(small(tmp_path, "rounds=1", sites=14, samples=10), Broken()).all_rounds()
    assert len(run.listener.records[0]["dropped"]) == 13
    assert sum("dropped: RuntimeError: broken" in text for text in run.listener.messages) == 10


def test_the_mean_loss_does_not_depend_on_the_order_of_arrival(tmp_path: Path):
    class Losses(ClientApp):  # float addition is not associative
        def __call__(self, message, context):
            reply = WatchedApp()(message, context)
            if message.metadata.message_type == "train":
                loss = (1e16, 1.0, -1e16, 3.0)[int(context.node_config["partition-id"])]
                reply.content[METRICS] = MetricRecord({"loss": loss, "samples": 10})
            return reply

    losses = []
    for name, grid in (("ahead", InlineGrid), ("back", LastFirstGrid)):
        run = set_up(small(tmp_path / name, "rounds=1", sites=4, samples=10), Losses(), grid).all_rounds()
        losses.append(run.listener.records[0]["train_loss"])
    assert losses[0] == losses[1]
