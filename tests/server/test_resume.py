"""A run that was stopped goes on as if it had not been: the same digest, states and metrics, whatever the stop has left."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.conf import Config
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.run_folder.folder import METRICS, SUMMARY, RunFolder
from fedloom.server.run_folder.layout import DATA
from tests.server.parts import Recorder, folder
from tests.server.resumes import Stopped, Stopper, configured, metrics, no_metrics, orphans, results, resumed, run, stopped
from tests.server.runs import copied
from tests.sims.other_data import frame

MODES = ["exact", "regularised", "independent", "fedavg"]


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


@pytest.mark.parametrize(("mode", "after"), [*(("exact", after) for after in (1, 2, 4)), *((mode, 1) for mode in MODES[1:])])
def test_a_run_stopped_after_a_round_ends_as_one_that_was_not(tmp_path: Path, halted, undisturbed, mode, after):
    mode = f"objective.mode={mode}"
    config = halted(tmp_path, after, mode)
    assert json.loads((folder(config) / SUMMARY).read_text())["status"] == "failed"
    assert len(metrics(folder(config))) == after  # the round that was committed last is on record
    listener = Recorder()
    resumed(config, listener)
    assert [record["round"] for record in listener.records] == list(range(after + 1, 5))
    assert results(folder(config)) == undisturbed(mode)
    assert check(folder(config)) == []


def test_all_options_of_training_are_taken_up_where_they_were(tmp_path: Path):
    words = ["training.optimizer={name: adamw, betas: [0.9, 0.95]}", "training.schedule={name: step, every: 1, warm_up: 1}",
             "training.augment=[{name: RandomCrop, size: 8, padding: 1}, RandomHorizontalFlip]", "training.precision=bf16",
             "training.label_smoothing=0.1", "training.channels_last=true", "training.rate=0.01"]  # fmt: skip
    whole, halves = configured(tmp_path / "whole", *words), stopped(configured(tmp_path / "halves", *words), 2)
    run(whole)
    resumed(halves)
    assert results(folder(halves)) == results(folder(whole))
    assert check(folder(halves)) == []
    run(plain := configured(tmp_path / "plain", words[-1]))
    assert results(folder(plain))["summary"]["digest"] != results(folder(whole))["summary"]["digest"]


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that was stopped between two rounds, which no test changes."""
    config = configured(tmp_path_factory.mktemp("between"))
    listener = Recorder()
    listener.round_started = lambda round, asked: (_ for _ in ()).throw(Stopped()) if round == 3 else None
    with pytest.raises(Stopped):
        run(config, listener)
    assert len(metrics(folder(config))) == 2
    return config


@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_a_stop_leaves_the_run_ends_as_one_that_was_not_stopped(
    tmp_path: Path, between: Config, undisturbed, damage
):
    config = copied(between, tmp_path)
    damage(folder(config))
    resumed(config)
    assert results(folder(config)) == undisturbed()
    assert not (folder(config) / "staging").exists()
    assert check(folder(config)) == []


def test_without_its_metrics_a_run_continues_and_the_ledger_has_all_but_older_accuracies_and_losses(
    tmp_path: Path, halted, undisturbed
):
    config = halted(tmp_path, 3)
    no_metrics(folder(config))
    resumed(config)
    expected = undisturbed()
    older = ("accuracy", "loss")
    first, *rest = [{key: item for key, item in line.items() if key not in older} for line in expected["metrics"]]
    assert [first, *rest[:1]] == metrics(folder(config))[:2]
    assert metrics(folder(config))[2:] == expected["metrics"][2:]
    assert {**results(folder(config)), "metrics": expected["metrics"]} == expected


def test_a_run_may_be_stopped_in_the_middle_of_a_round_again_and_again(tmp_path: Path, undisturbed):
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
    assert results(folder(config)) == undisturbed("federation.fraction=0.67")
    assert check(folder(config)) == []


@pytest.mark.parametrize("what", ["before the first round", "before the ledger"])
def test_a_run_stopped_before_its_first_round_begins(tmp_path: Path, undisturbed, what):
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
    assert results(folder(config)) == undisturbed()
    assert check(folder(config)) == []


def test_resuming_a_run_that_is_missing_begins_it(tmp_path: Path, undisturbed):
    config = configured(tmp_path)
    resumed(config)
    assert results(folder(config)) == undisturbed()


@pytest.mark.parametrize(("baseline", "after"), [("fedavg", 2), ("independent", 1), ("independent", 4)])
def test_baselines_that_were_half_done_are_finished(tmp_path: Path, undisturbed, baseline, after):
    words = "baselines=[fedavg,independent]"
    config = stopped(configured(tmp_path, words), after, baseline)
    resumed(config)
    assert results(folder(config)) == undisturbed(words)
    for path in (folder(config), *(folder(config) / "baselines").iterdir()):
        assert check(path) == []


def test_all_contributions_are_kept_on_demand_and_change_no_result(tmp_path: Path, halted, undisturbed):
    config = halted(tmp_path, 3, "federation.history=all")
    resumed(config)
    ours, theirs = results(folder(config)), undisturbed()
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


def test_a_table_that_changed_since_the_run_began_is_a_warning(tmp_path: Path):
    domain = frame(tmp_path, x=range(90), sick=[0, 1, 1] * 30) + "?target=sick"
    config = stopped(
        configured(tmp_path, f"sites=[{{domain: '{domain}', count: 3}}]", "network={name: mlp, widths: [4]}"), 1
    )

    def warned(after: int) -> int:
        listener = Stopper(after)
        with pytest.raises(Stopped):
            resumed(config, listener)
        return sum("table.csv?target=sick has changed since the run began" in line for line in listener.messages)

    assert warned(2) == 0
    frame(tmp_path, x=range(1, 91), sick=[0, 1, 1] * 30)
    assert (warned(3), warned(4)) == (1, 0)


@pytest.mark.parametrize("text", ["", "[1", "[1]"])
def test_damaged_digests_of_data_are_a_warning_and_written_again(tmp_path: Path, text: str):
    made, digests = RunFolder(tmp_path), {"a.csv": "0" * 64}
    assert made.note_data(digests) == []
    (tmp_path / DATA).write_text(text, encoding="utf-8")
    (line,) = made.note_data(digests)
    assert "data.json is damaged" in line and "\n" not in line and made.note_data(digests) == []
