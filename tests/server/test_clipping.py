"""federation.clip_change: what moves further is scaled back before it is summed, and the record says so."""

from pathlib import Path

import pytest
import torch

from fedloom.clients.protocol.messages import ROUND, SITE
from fedloom.clients.protocol.reply_checks import Bounds
from fedloom.conf import UserError
from fedloom.server.run.checks import check
from fedloom.sims.benchmarks.soak_replies import LAYER, changed, entry
from tests.server.parts import WatchedApp, set_up, small, sum_of_contributions


def test_a_record_is_scaled_back_to_the_bound_along_its_own_direction():
    start = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0]), "n": torch.tensor([7])}
    given = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([4.0]), "n": torch.tensor([8])}
    found, moved = Bounds(clip_change=1.0).clipped(given, start)
    assert moved == pytest.approx(5.0)
    torch.testing.assert_close(found["a"], torch.tensor([1.6, 1.0]))
    torch.testing.assert_close(found["b"], torch.tensor([0.8]))
    assert found["n"].item() == 8


@pytest.mark.parametrize(("limit", "end"), [(5.0, 3.0), (0.0, 1e6), (1.0, float("inf")), (1.0, float("nan"))])
def test_what_is_within_the_bound_or_not_finite_is_as_it_came(limit: float, end: float):
    given = {"a": torch.tensor([end])}
    found, moved = Bounds(clip_change=limit).clipped(given, {"a": torch.tensor([0.0])})
    assert moved == 0.0
    assert torch.equal(found["a"], given["a"]) or end != end


@pytest.mark.parametrize("record", [SITE, ROUND])
def test_what_the_ledger_holds_is_the_clipped_contribution_and_the_round_says_how_far_it_moved(tmp_path: Path, record: str):
    name = LAYER if record == SITE else "head.bias"
    words = ("federation.clip_change=0.01", "federation.largest_change=0", "rounds=1")
    run = set_up(small(tmp_path, *words, samples=20), WatchedApp(changed(record, entry(name, 1000.0)), rounds=(1,)))
    before = run.aggregate.slots.contributions.floats("site-0001", "sum")
    run.all_rounds()
    (record_line,) = run.listener.records
    assert record_line["dropped"] == {}
    assert record_line["clipped"]["site-0001"][record] == pytest.approx(1000.0, rel=0.05)
    assert record_line["clipped"]["site-0000"].keys() == {SITE, ROUND}  # an honest site moves further than this bound, too
    after = run.aggregate.view().contribution("sum", "site-0001")
    assert sum(float((after[each] - before[each]).square().sum()) for each in after) ** 0.5 <= 0.01001
    assert run.aggregate.digest()["sum"] == sum_of_contributions(run.aggregate)


def test_a_reply_that_is_refused_is_not_reported_as_clipped(tmp_path: Path):
    words = ("federation.clip_change=0.01", "federation.largest_change=5", "rounds=1")
    run = set_up(small(tmp_path, *words, samples=20), WatchedApp(changed(SITE, entry(LAYER, 6.0)), rounds=(1,)))
    run.all_rounds()
    (record,) = run.listener.records
    assert "moved by" in record["dropped"]["site-0001"]
    assert "site-0001" not in record["clipped"]


def test_without_the_bound_nothing_is_reported(tmp_path: Path):
    run = set_up(small(tmp_path, "rounds=1", samples=20)).all_rounds()
    assert "clipped" not in run.listener.records[0]


@pytest.mark.parametrize(("key", "words"), [("partial_sums", ("engine.name=ray",)), ("secure_aggregation", ())])
def test_where_the_server_sees_no_single_reply_it_cannot_clip(tmp_path: Path, key: str, words: tuple[str, ...]):
    with pytest.raises(UserError, match=rf"federation\.clip_change: .*leave federation\.{key} off"):
        check(small(tmp_path, "federation.clip_change=1", f"federation.{key}=true", *words))
