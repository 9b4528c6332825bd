"""Threads and processes that create a run of the same name at the same time: one has it, the others are refused."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.conf import UserError, load
from fedloom.conf.schema import Config
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.database import acquire, unlock
from fedloom.server.run_folder import listing
from fedloom.server.run_folder.folder import RunFolder, read_config, stored
from fedloom.sims.operations.simulate import simulate
from tests.server.kills import CHILDREN

FEW = ["rounds=1", "sites=[{domain: digits, count: 2, samples: 20}]", "data.size=8", "data.test_limit=20", "baselines=[]",
       "network=mlp", "engine.name=inline", "run.name=same"]  # fmt: skip
AT_ONCE = 4
NAMES = 30


def configured(tmp_path: Path, seed: int, *words: str) -> Config:
    return load("digits", *FEW, f"run.root={tmp_path}", f"seed={seed}", *words)


def at_once(work: Callable[[int], object]) -> list[object]:
    """The results of some threads that start together: what `work` returns or raises, by number."""
    ready, results = threading.Barrier(AT_ONCE), list[object]([None] * AT_ONCE)

    def one(number: int) -> None:
        ready.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def whole(path: Path, seed: int) -> None:
    """Check that the run is that of a seed alone, and that nothing else is left next to it."""
    assert read_config(path).seed == seed and check(path) == []
    assert [entry.name for entry in path.parent.iterdir() if entry.name.startswith(".same")] == []


@pytest.mark.parametrize("attempt", range(5))
def test_one_of_several_threads_creates_the_folder(tmp_path: Path, attempt: int):
    configs = [configured(tmp_path, seed) for seed in range(AT_ONCE)]
    path = tmp_path / "same"
    results = at_once(lambda number: RunFolder(path).open(configs[number]))
    won = [number for number, result in enumerate(results) if result is None]
    assert len(won) == 1 and (path / "config.yaml").read_text() == stored(configs[won[0]])
    for error in results[: won[0]] + results[won[0] + 1 :]:
        assert isinstance(error, UserError) and "the run 'same' exists" in str(error), error
    assert [entry.name for entry in tmp_path.iterdir()] == ["same"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_one_of_several_threads_runs_it(tmp_path: Path, overwrite: bool):
    if overwrite:
        simulate(configured(tmp_path, 9))
    word = f"run.overwrite={str(overwrite).lower()}"
    results = at_once(lambda number: simulate(configured(tmp_path, number, word)))
    won = [number for number, result in enumerate(results) if isinstance(result, dict)]
    refused = [result for result in results if not isinstance(result, dict)]
    assert won and all(isinstance(error, UserError) and len(str(error).splitlines()) == 1 for error in refused), results
    assert len(won) == 1 or overwrite  # one that ends before another begins is overwritten
    whole(tmp_path / "same", json.loads((tmp_path / "same/summary.json").read_text())["seed"])


def test_a_run_that_another_one_has_just_moved_away_can_be_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = configured(tmp_path, 0, "run.overwrite=true")
    RunFolder(tmp_path / "same").open(config)
    begun = listing.is_begun

    def moved(path: Path) -> bool:
        path.rename(tmp_path / "elsewhere")
        return begun(path)

    monkeypatch.setattr(listing, "is_begun", moved)
    listing.refuse_existing(config)


def race(root: Path, number: int, ready: Any, results: Any) -> None:
    """In a process: create folders of the same names as others at the same time, then run one of them."""
    torch.set_num_threads(1)
    said: list[str] = []
    for name in range(NAMES):
        config = configured(root, number, f"run.name=same-{name}")
        ready.wait()
        said.append(_said(lambda config=config: RunFolder(root / config.run.name).open(config)))
    for word in ("false", "true"):
        config = configured(root, number, f"run.overwrite={word}")
        ready.wait()
        said.append(_said(lambda config=config: simulate(config)))
    results.put((number, said))


def _said(work: Callable[[], object]) -> str:
    try:
        work()
    except UserError as error:
        return f"refused: {error}"
    except BaseException as error:
        return f"failed: {error!r}"
    return "won"


def test_one_of_several_processes_has_it(tmp_path: Path):
    ready, results = CHILDREN.Barrier(AT_ONCE), CHILDREN.Queue()
    processes = [CHILDREN.Process(target=race, args=(tmp_path, number, ready, results)) for number in range(AT_ONCE)]
    for process in processes:
        process.start()
    said = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    for name in range(NAMES):
        outcomes = {number: lines[name] for number, lines in said.items()}
        won = [number for number, line in outcomes.items() if line == "won"]
        assert len(won) == 1 and read_config(tmp_path / f"same-{name}").seed == won[0]
        assert all(f"refused: the run 'same-{name}' exists" in line for line in outcomes.values() if line != "won"), outcomes
    *_, first, second = zip(*said.values(), strict=True)
    assert first.count("won") == 1 and second.count("won") >= 1
    assert all(line == "won" or line.startswith("refused: ") for line in (*first, *second)), (first, second)
    whole(tmp_path / "same", json.loads((tmp_path / "same/summary.json").read_text())["seed"])


def test_a_ledger_that_cannot_be_created_leaves_its_folder_unlocked(tmp_path: Path):
    for sites in (["a", "a"], ["a", "b"]):
        lock = acquire(tmp_path)
        if sites == ["a", "b"]:
            (tmp_path / "ledger.sqlite").mkdir()
        with pytest.raises(UserError):
            Ledger.create(tmp_path, "run", "", 32, sites, lock=lock)
        unlock(acquire(tmp_path))
