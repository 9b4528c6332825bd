"""A run that has begun gets more rounds, with the bits of one that had them from the start where the rate allows it."""

import dataclasses
from pathlib import Path

import pytest

from fedloom.conf import Config, UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.run_folder.folder import RunFolder, read_config
from tests.server.parts import Recorder, files, folder
from tests.server.resumes import Stopped, configured, results, resumed, run, stopped
from tests.server.runs import copied

CONSTANT = "training.schedule=constant"


def more(config: Config, rounds: int = 4) -> Config:
    return dataclasses.replace(config, rounds=rounds)


@pytest.mark.parametrize("words", [["baselines=[fedavg]"], ["objective.name=fedavg", "strategy.name=fedadam"],
                                   ["federation.secure_aggregation=true", "strategy.weighting=equal"]])  # fmt: skip
def test_a_finished_run_with_more_rounds_has_the_bits_of_one_that_had_them_from_the_start(tmp_path: Path, words):
    words = [CONSTANT, "objective.mode=exact", *words] if "objective.name=fedavg" not in words else [CONSTANT, *words]
    run(whole := configured(tmp_path / "whole", *words))
    run(short := configured(tmp_path / "short", *words, "rounds=2"))
    listener = Recorder()
    assert resumed(more(short), listener)["status"] == "finished"
    assert listener.messages[0] == (
        "rounds: 4 (before: 2). training.schedule=constant continues over 4 rounds: round 3 begins with the rate 0.03."
    )
    if "federation.secure_aggregation=true" in words:  # masks are random
        assert [results(folder(one))["summary"]["accuracy"] for one in (short, whole)]
        assert results(folder(short))["states"] == results(folder(whole))["states"]
    else:
        assert results(folder(short)) == results(folder(whole))
    assert check(folder(short)) == []
    assert read_config(folder(short)).rounds == 4
    before = files(folder(short))
    resumed(more(short))
    assert files(folder(short)) == before, "nothing remains to do"


def test_the_cosine_continues_over_the_new_number(tmp_path: Path):
    run(config := configured(tmp_path, "rounds=2"))
    listener = Recorder()
    resumed(more(config), listener)
    assert listener.messages[0] == (
        "rounds: 4 (before: 2). training.schedule=cosine continues over 4 rounds: round 3 begins with the rate 0.015; "
        "the first 2 rounds followed it over 2."
    )


def test_a_crash_before_the_configuration_is_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(whole := configured(tmp_path / "whole", CONSTANT))
    run(short := configured(tmp_path / "short", CONSTANT, "rounds=2"))

    def crash(self: RunFolder, text: str) -> None:
        raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RunFolder, "write_config", crash)
        resumed(more(short))
    assert read_config(folder(short)).rounds == 2
    resumed(short)
    assert results(folder(short)) == results(folder(whole))


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_stopped_gets_them_too_and_may_stop_again(tmp_path: Path, after: int):
    run(whole := configured(tmp_path / "whole", CONSTANT))
    short = copied(stopped(configured(tmp_path / "short", CONSTANT, "rounds=2"), 1), tmp_path / "copy")
    listener = Recorder()
    listener.round_done = lambda record: (_ for _ in ()).throw(Stopped()) if record["round"] == after + 1 else None
    with pytest.raises(Stopped):
        resumed(more(short), listener)
    resumed(more(short))
    assert results(folder(short)) == results(folder(whole))


def test_fewer_rounds_and_sites_in_turn_are_refused_and_nothing_changes(tmp_path: Path):
    run(config := configured(tmp_path / "together"))
    before = files(folder(config))
    with pytest.raises(UserError, match=r"rounds: got 3, but .*digits has 4 rounds; it can only get more"):
        resumed(more(config, 3))
    assert files(folder(config)) == before
    words = ["strategy.name=arithmetic", "objective={name: local, mode: sequential_ab}", "rounds=1"]
    run(turns := configured(tmp_path / "turns", *words))
    with pytest.raises(UserError, match=r"rounds: .*digits has a method whose sites train one after the other"):
        resumed(more(turns, 2))
    with Ledger.open(folder(turns), server=False) as ledger:
        assert ledger.newest("extended") is None
