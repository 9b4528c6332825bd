"""A run that was stopped goes on as if it had not been: the same digest, states and metrics, whatever the stop has left."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clients.app import app
from clients.states import read_metadata
from clients.store import SiteStore
from conf import Config, UserError
from fusion.exact import dequantise, digest, exact
from server.experiment import run_experiment
from server.ledger import Ledger, LedgerError
from server.ledger.audit import check
from server.runfolder import METRICS, SUMMARY
from sims.engines.adapter import store_folder
from sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, WatchedApp, files, folder, small

MODES = ["exact", "regularised", "independent", "fedavg"]


class Stopped(Exception):
    """What a listener raises to stop a run."""


class Stopper(Recorder):
    """A listener that stops the run, or its baseline of that name, after the commit of a round."""

    def __init__(self, after: int, baseline: str = "") -> None:
        super().__init__()
        self.after, self.baseline, self.at = after, baseline, ""

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self.at = Path(note).name

    def round_done(self, record: dict[str, Any]) -> None:
        super().round_done(record)
        if record["round"] == self.after and self.baseline in ("", self.at):
            raise Stopped


def configured(root: Path, *overrides: str) -> Config:
    return small(root, "rounds=4", "evaluation.every=2", *overrides, sites=3, samples=20)


def run(config: Config, listener: Recorder | None = None, client=app) -> dict[str, Any]:
    return run_experiment(InlineGrid(3, store_folder(config), client), config, listener or Recorder())


def resumed(config: Config, listener: Recorder | None = None, client=app) -> dict[str, Any]:
    return run(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True)), listener, client)


def stopped(config: Config, after: int, baseline: str = "") -> Config:
    """The configuration of a run that was stopped after that round."""
    with pytest.raises(Stopped):
        run(config, Stopper(after, baseline))
    return config


def metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for the seconds."""
    lines = [json.loads(line) for line in (path / METRICS).read_text().splitlines()]
    return [{key: item for key, item in line.items() if key != "seconds"} for line in lines]


def results(path: Path) -> dict[str, Any]:
    """All that a run and its baselines leave, but for times: metrics, summary, ledger, all bits of the states."""
    summary = json.loads((path / SUMMARY).read_text())
    found = {"summary": {key: item for key, item in summary.items() if key != "seconds"}, "metrics": metrics(path)}
    found["states"] = files(path / "states")
    found["labels"] = {file.name: read_metadata(file) for file in (path / "states").iterdir()}
    with Ledger.open(path, server=False) as ledger:
        found["rounds"] = [dataclasses.replace(row, time="") for row in ledger.rounds()]
        found["latest"] = {name: ledger.history(name) for name in ledger.sites()}
    beside = path / "baselines"
    return {**found, **{one.name: results(one) for one in (beside.iterdir() if beside.is_dir() else ())}}


def line_gone(path: Path) -> None:
    lines = (path / METRICS).read_text().splitlines(keepends=True)
    (path / METRICS).write_text("".join(lines[:-1]))


def line_torn(path: Path) -> None:
    text = (path / METRICS).read_text()
    (path / METRICS).write_text(text[: text.rindex('"train_loss"') + 14])


def line_of_zeros(path: Path) -> None:
    (path / METRICS).write_bytes((path / METRICS).read_bytes() + b"\x00\xff" * 100)


def line_not_committed(path: Path) -> None:
    (path / METRICS).write_text((path / METRICS).read_text() + '{"round": 3, "replies": 99}\n')


def no_metrics(path: Path) -> None:
    (path / METRICS).unlink()


def orphans(path: Path) -> None:
    """A reply of the next round, as a blob that no row refers to, one half written, and one that a worker left."""
    with Ledger.open(path) as ledger:
        orphan = ledger.blobs.put({"extractor.0.weight": torch.ones(3, dtype=torch.int64)})
        (ledger.blobs.folder / f".{orphan}.safetensors-x").write_bytes(b"half")
    left = path / "staging" / "site-0001" / "round-000003.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")


def no_seal(path: Path) -> None:
    (path / "ledger.sha256").unlink(missing_ok=True)


def no_summary(path: Path) -> None:
    (path / SUMMARY).unlink()


DAMAGE: list[Callable[[Path], None]] = [
    line_gone,
    line_torn,
    line_of_zeros,
    line_not_committed,
    orphans,
    no_seal,
    no_summary,
]


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The results of a run that nobody stopped."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def of(*overrides: str) -> dict[str, Any]:
        if overrides not in known:
            config = configured(tmp_path_factory.mktemp("smooth"), *overrides)
            run(config)
            known[overrides] = results(folder(config))
        return known[overrides]

    return of


@pytest.mark.parametrize(("mode", "after"), [*(("exact", after) for after in (1, 2, 4)), *((mode, 1) for mode in MODES[1:])])
def test_a_run_stopped_after_a_round_ends_as_one_that_was_not(tmp_path: Path, smooth, mode, after):
    mode = f"objective.mode={mode}"
    config = stopped(configured(tmp_path, mode), after)
    assert json.loads((folder(config) / SUMMARY).read_text())["status"] == "failed"
    assert len(metrics(folder(config))) == after - 1  # the line of the round that was committed last is missing
    listener = Recorder()
    resumed(config, listener)
    assert [record["round"] for record in listener.records] == list(range(after + 1, 5))
    assert results(folder(config)) == smooth(mode)
    assert check(folder(config)) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_a_stop_leaves_the_run_ends_as_one_that_was_not_stopped(tmp_path: Path, smooth, damage):
    config = configured(tmp_path)
    listener = Recorder()
    listener.round_started = lambda round, asked: (_ for _ in ()).throw(Stopped()) if round == 3 else None
    with pytest.raises(Stopped):
        run(config, listener)
    assert len(metrics(folder(config))) == 2
    damage(folder(config))
    resumed(config)
    assert results(folder(config)) == smooth()
    assert not (folder(config) / "staging").exists()
    assert check(folder(config)) == []


def test_without_its_metrics_a_run_goes_on_and_the_ledger_has_all_but_the_older_accuracies(tmp_path: Path, smooth):
    config = stopped(configured(tmp_path), 3)
    no_metrics(folder(config))
    resumed(config)
    expected = smooth()
    first, *rest = [{key: item for key, item in line.items() if key != "accuracy"} for line in expected["metrics"]]
    assert [first, *rest[:1]] == metrics(folder(config))[:2]
    assert metrics(folder(config))[2:] == expected["metrics"][2:]
    assert {**results(folder(config)), "metrics": expected["metrics"]} == expected


def test_a_run_may_be_stopped_in_the_middle_of_a_round_again_and_again(tmp_path: Path, smooth):
    """Replies of an abandoned round are written, its sites' stores are ahead of the ledger: it begins at the commit."""
    config = configured(tmp_path, "federation.fraction=0.67")

    class Half(Recorder):
        def reply(self, site: str, ok: bool, reason: str) -> None:
            super().reply(site, ok, reason)
            if len(self.replies) == 3:  # of two a round
                raise Stopped

    with pytest.raises(Stopped):
        run(config, Half())
    for _ in range(2):
        with pytest.raises(Stopped):
            resumed(config, Half())
    resumed(config)
    assert results(folder(config)) == smooth("federation.fraction=0.67")
    assert check(folder(config)) == []


@pytest.mark.parametrize("what", ["before the first round", "before the ledger"])
def test_a_run_stopped_before_its_first_round_begins(tmp_path: Path, smooth, what):
    config = configured(tmp_path)
    listener = Recorder()
    listener.round_started = lambda round, asked: (_ for _ in ()).throw(Stopped())
    with pytest.raises(Stopped):
        run(config, listener)
    orphans(folder(config))
    if what == "before the ledger":
        for path in folder(config).glob("ledger.*"):
            path.unlink()
    resumed(config)
    assert results(folder(config)) == smooth()
    assert check(folder(config)) == []


def test_resuming_a_run_that_is_not_there_begins_it(tmp_path: Path, smooth):
    config = configured(tmp_path)
    resumed(config)
    assert results(folder(config)) == smooth()


@pytest.mark.parametrize(("baseline", "after"), [("fedavg", 2), ("independent", 1), ("independent", 4)])
def test_baselines_that_were_half_done_are_finished(tmp_path: Path, smooth, baseline, after):
    words = "baselines=[fedavg,independent]"
    config = stopped(configured(tmp_path, words), after, baseline)
    resumed(config)
    assert results(folder(config)) == smooth(words)
    for path in (folder(config), *(folder(config) / "baselines").iterdir()):
        assert check(path) == []


@pytest.mark.parametrize("mode", ["exact", "regularised", "independent"])
def test_a_site_that_lost_its_store_begins_at_its_contribution_and_that_is_told(tmp_path: Path, mode):
    """As if the contribution, and the head that all share, were what its store held."""
    lost, given = (stopped(configured(tmp_path / name, f"objective.mode={mode}"), 2) for name in ("lost", "given"))
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
    (told,) = listener.messages
    assert told == "round 3: site-0001: its own state is lost: that after round 2; it begins again at its contribution"
    assert summary["status"] == "finished" and all(summary["checks"].values())
    assert [(order.round, order.base) for order in client.orders if order.site == 1] == [(3, 2), (3, 2), (4, 3)]
    assert all(record["replies"] == 3 and not record["dropped"] for record in listener.records)
    resumed(given)
    assert results(folder(lost)) == results(folder(given))
    assert check(folder(lost)) == []


@pytest.mark.parametrize("mode", ["exact", "regularised", "independent"])
def test_all_sites_may_lose_their_stores(tmp_path: Path, mode):
    config = stopped(configured(tmp_path, f"objective.mode={mode}"), 2)
    shutil.rmtree(store_folder(config))
    listener = Recorder()
    summary = resumed(config, listener)
    assert len(listener.messages) == 3
    assert [record["replies"] for record in listener.records] == [3, 3]
    assert all(summary["checks"].values())


def test_fedavg_has_nothing_to_lose(tmp_path: Path, smooth):
    config = stopped(configured(tmp_path, "objective.mode=fedavg"), 2)
    shutil.rmtree(store_folder(config), ignore_errors=True)
    listener = Recorder()
    resumed(config, listener)
    assert listener.messages == []
    assert results(folder(config)) == smooth("objective.mode=fedavg")


def test_a_lost_store_may_stop_the_run_and_put_back_it_goes_on(tmp_path: Path, smooth):
    words = "federation.lost_store=stop"
    config = stopped(configured(tmp_path, words), 2)
    shutil.move(store_folder(config), tmp_path / "away")
    with pytest.raises(
        UserError, match=r"round 3: .*site-000\d: its own state is lost.*federation\.lost_store=restart"
    ) as told:
        resumed(config)
    assert "\n" not in str(told.value)
    with Ledger.open(folder(config)) as ledger:
        last = ledger.last_round()
    assert last is not None and last.round == 2
    shutil.move(tmp_path / "away", store_folder(config))
    resumed(config)
    assert results(folder(config)) == smooth(words)


@pytest.mark.parametrize("other", ["seed=1", "rounds=5", "training.rate=0.5", "objective.mode=fedavg"])
def test_another_configuration_is_not_resumed(tmp_path: Path, other):
    config = stopped(configured(tmp_path), 2)
    before = files(folder(config))
    with pytest.raises(UserError, match=r"digits: was run with another configuration \(config\.yaml\); only that one"):
        resumed(configured(tmp_path, other))
    assert files(folder(config)) == before


@pytest.mark.parametrize("content", ["nothing", "config.yaml"])
def test_what_is_no_run_is_not_resumed(tmp_path: Path, content):
    config = configured(tmp_path)
    folder(config).mkdir(parents=True)
    if content != "nothing":
        (folder(config) / content).write_text("model: precious\n")
    before = files(tmp_path)
    with pytest.raises(UserError, match="is no run of fedloom"):
        resumed(config)
    assert files(tmp_path) == before


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path):
    config = configured(tmp_path, "baselines=[fedavg]")
    summary = run(config)
    before, client = files(folder(config)), WatchedApp()
    assert resumed(config, client=client) == json.loads(json.dumps(summary))
    assert files(folder(config)) == before
    assert client.orders == []


def test_what_a_finished_run_has_lost_is_made_again(tmp_path: Path, smooth):
    config = configured(tmp_path)
    run(config)
    shutil.rmtree(folder(config) / "states")
    (folder(config) / METRICS).write_text("")
    client = WatchedApp()
    resumed(config, client=client)
    assert client.orders == []
    assert {**results(folder(config)), "metrics": []} == {**smooth(), "metrics": []}
    assert metrics(folder(config))[-1] == smooth()["metrics"][-1]
    assert check(folder(config)) == []


def test_a_second_server_is_refused_in_one_line_and_changes_nothing(tmp_path: Path):
    config = stopped(configured(tmp_path), 2)
    with Ledger.open(folder(config)):
        before = files(folder(config))
        with pytest.raises(LedgerError, match=r"digits: process \d+ is working on it; let it end, or stop it") as told:
            resumed(config)
        assert "\n" not in str(told.value)
        assert files(folder(config)) == before
    assert resumed(config)["status"] == "finished"


def test_all_contributions_are_kept_on_demand_and_change_no_result(tmp_path: Path, smooth):
    config = stopped(configured(tmp_path, "federation.history=all"), 3)
    resumed(config)
    ours, theirs = results(folder(config)), smooth()
    for same in ("metrics", "states"):
        assert ours[same] == theirs[same]
    assert {key: ours["summary"][key] for key in ("digest", "accuracy")} == {
        key: theirs["summary"][key] for key in ("digest", "accuracy")
    }
    with Ledger.open(folder(config)) as ledger:
        for name in ledger.sites():
            kept = ledger.history(name)
            assert [one.round for one in kept] == [0, 1, 2, 3, 4]
            assert len({one.blob for one in kept}) == 5
            for one in kept:
                ledger.blobs.get(one.blob)  # it is there, and what its name says
        assert all(row.states for row in ledger.rounds())
    assert {name: kept[-1:] for name, kept in ours["latest"].items()} == theirs["latest"]
    assert check(folder(config)) == []
