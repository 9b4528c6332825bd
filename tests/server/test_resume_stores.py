"""Runs that go on although sites have lost their stores: the message, where they begin, and how to stop instead."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedloom.clients.storage.store import SiteStore
from fedloom.conf import UserError
from fedloom.fusion.exact import dequantise, exact
from fedloom.fusion.state import digest
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.sims.engines.adapter import store_folder
from tests.server.parts import Recorder, WatchedApp, folder
from tests.server.resumes import results, resumed


def sent_again(found: dict[str, Any]) -> int:
    """The bytes that went to the second site in round 3, taken out of its records."""
    records = [found["metrics"][2], *(row.record for row in found["rounds"] if row.round == 3)]
    counted = {record["bytes"].pop("site-0001")[0] for record in records}
    assert len(counted) == 1
    return counted.pop()


@pytest.mark.parametrize("mode", ["exact", "regularised", "independent"])
def test_a_site_that_lost_its_store_begins_at_its_contribution_and_that_is_reported(tmp_path: Path, halted, mode):
    """As if the contribution, and the head that all share, were what its store held."""
    lost, given = (halted(tmp_path / name, 2, f"objective.mode={mode}") for name in ("lost", "given"))
    with Ledger.open(folder(given)) as ledger:
        last = ledger.last_round()
        assert last is not None
        shared = ledger.blobs.get(last.states["shared"])
        mine = dequantise(exact(ledger.blobs.get(ledger.all_latest()["site-0001"].blob), 32), 32)
        store = SiteStore(store_folder(given), ledger.run().run, "site-0001")
    before = digest(store.load(2))
    store.save(2, 1, {**shared, **mine})
    assert digest(store.load(2)) != before  # its own head is gone, or at least what is below 2 ** -32
    with Ledger.open(folder(lost)) as ledger:
        shutil.rmtree(store_folder(lost) / ledger.run().run / "site-0001")
    client, listener = WatchedApp(), Recorder()
    summary = resumed(lost, listener, client)
    (message,) = listener.messages
    assert message == "round 3: site-0001 has lost its own state after round 2; it starts again from its contribution"
    assert summary["status"] == "finished" and all(summary["checks"].values())
    assert [(order.round, order.base) for order in client.orders if order.site == 1] == [(3, 2), (3, 2), (4, 3)]
    assert all(record["replies"] == 3 and not record["dropped"] for record in listener.records)
    resumed(given)
    found, wanted = results(folder(lost)), results(folder(given))
    again, once = (sent_again(one) for one in (found, wanted))
    assert again > once  # what it lost
    assert found == wanted
    assert check(folder(lost)) == []


@pytest.mark.parametrize("mode", ["exact", "regularised", "independent"])
def test_all_sites_may_lose_their_stores(tmp_path: Path, halted, mode):
    config = halted(tmp_path, 2, f"objective.mode={mode}")
    shutil.rmtree(store_folder(config))
    listener = Recorder()
    summary = resumed(config, listener)
    assert len(listener.messages) == 3
    assert [record["replies"] for record in listener.records] == [3, 3]
    assert all(summary["checks"].values())


def test_fedavg_has_nothing_to_lose(tmp_path: Path, halted, undisturbed):
    config = halted(tmp_path, 2, "objective.mode=fedavg")
    shutil.rmtree(store_folder(config), ignore_errors=True)
    listener = Recorder()
    resumed(config, listener)
    assert listener.messages == []
    assert results(folder(config)) == undisturbed("objective.mode=fedavg")


def test_a_lost_store_may_stop_the_run_and_put_back_it_continues(tmp_path: Path, halted, undisturbed):
    words = "federation.lost_store=stop"
    config = halted(tmp_path, 2, words)
    shutil.move(store_folder(config), tmp_path / "away")
    with pytest.raises(
        UserError, match=r"round 3: .*site-000\d has lost its own state.*federation\.lost_store=restart"
    ) as raised:
        resumed(config)
    assert "\n" not in str(raised.value)
    with Ledger.open(folder(config)) as ledger:
        last = ledger.last_round()
    assert last is not None and last.round == 2
    shutil.move(tmp_path / "away", store_folder(config))
    resumed(config)
    assert results(folder(config)) == undisturbed(words)
