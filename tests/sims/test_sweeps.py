"""Many runs of one experiment: which there are, what is there already, and what happens to them."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from rich.console import Console

from fedloom import sweep
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.conf.loading import read_values, to_json
from fedloom.server.ledger.database import acquire
from fedloom.server.run_folder.listing import read_summary, status
from fedloom.server.run_folder.metrics_file import read_metrics
from fedloom.sims.engines.share import Share
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.progress.listeners import QuietListener
from fedloom.sims.sweeps.events import Teller, repeat
from fedloom.sims.sweeps.names import label_of, part_of_name, short_keys
from fedloom.sims.sweeps.outcome import BUSY_MESSAGE, attempt
from fedloom.sims.sweeps.plan import plan
from fedloom.sims.sweeps.work import carry_out, ready
from fedloom.sims.sweeps.worker_pool import START, parts
from tests.sims.commands import FEDLOOM, SMALL, Command, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")

QUICK = [*SMALL, "evaluation.sites=0"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("training.rate=0.01,0.03", [0.01, 0.03]),
        ("training.rate=[0.01,1e-3]", [0.01, 0.001]),
        ("objective.mode=exact,fedavg", ["exact", "fedavg"]),
        ("network.widths=[16],[32,32]", [[16], [32, 32]]),
        ("network.widths=[[16]]", [[16]]),
        ("network={name: mlp, widths: [8]},{name: conv6}", [{"name": "mlp", "widths": [8]}, {"name": "conv6"}]),
        ("network.name=torchvision:resnet18,mine:Net", ["torchvision:resnet18", "mine:Net"]),
        ("strategy.note='a,b',true", ["a,b", True]),
    ],
)
def test_values_are_read_as_lists_of_yaml(text: str, values: list):
    assert read_values(text) == (text.partition("=")[0], values)


@given(some.lists(some.text(), unique=True, max_size=6))
def test_names_of_values_tell_them_apart_and_are_names_of_files(values: list[str]):
    names = [part_of_name(value) for value in values]
    assert len(set(names)) == len(values)
    assert all(name.isprintable() and "/" not in name and len(name) < 60 for name in names)


def test_a_section_with_nothing_but_a_name_is_named_by_it():
    assert part_of_name({"name": "lenet"}) == "lenet" and label_of({"network": {"name": "lenet"}}) == "network=lenet"
    assert part_of_name({"name": "lenet", "width": 2}).startswith("__name____lenet")


def test_keys_are_as_short_as_tells_them_apart():
    assert short_keys(["training.rate", "strategy.name", "seed"]) == {
        "training.rate": "rate", "strategy.name": "strategy", "seed": "seed"}  # fmt: skip
    assert short_keys(["training.rate", "server.rate"]) == {key: key for key in ("training.rate", "server.rate")}


@given(some.integers(1, 12), some.integers(1, 40), some.integers(0, 9))
def test_a_machine_is_divided_among_runs(runs: int, cores: int, gpus: int):
    found = parts(runs, list(range(cores)), [str(number) for number in range(gpus)])
    for there, of in ((cores, [part.cores for part in found]), (gpus, [part.gpus for part in found])):
        dealt = [one for each in of for one in each]
        if there >= runs:
            assert len(dealt) == len(set(dealt)) == there and max(map(len, of)) - min(map(len, of)) <= 1
        elif there:
            assert all(len(each) == 1 for each in of) and len(set(dealt)) == there
            assert max(dealt.count(one) for one in dealt) == -(-runs // there)
    assert all(part.share.runs == runs for part in found)
    assert all(part.share.on_gpu == (max(1, -(-runs // gpus)) if gpus else 1) for part in found)


def test_a_share_is_of_memory_and_gpus_here_and_of_all_on_a_cluster():
    share = Share(runs=4, on_gpu=2)
    assert share.of_machine({"CPU": 8, "GPU": 1, "memory": 16.0}) == {"CPU": 8, "GPU": 0.5, "memory": 4.0}
    assert share.of_cluster({"CPU": 8, "GPU": 4, "node:a": 1}) == {"CPU": 2, "GPU": 1, "node:a": 0.25}


class Heard(QuietListener):
    """Notes every call."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.calls: list[tuple] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in ("started", "round_started", "reply", "round_done", "step", "note", "message"):
            return super().__getattribute__(name)
        return lambda *given: self.calls.append((name, *given))


def test_what_a_run_tells_is_heard_in_another_process_in_its_order():
    calls = [
        ("started", "digits (sum)", 2, 1, ""),
        ("step", "search", 0, 0),
        ("round_started", 1, 2),
        ("reply", "a", True, ""),
        ("reply", "b", False, "it raised"),
        ("round_done", {"round": 1}),
        ("step", "measuring", 3, 3),
        ("note", "measured"),
        ("message", "careful"),
    ]
    lines, heard = io.StringIO(), Heard()
    teller = Teller(lines)
    for name, *arguments in calls:
        getattr(teller, name)(*arguments)
    for line in lines.getvalue().splitlines():
        repeat(json.loads(line), heard)
    assert heard.calls == calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "training.rat=1,2"], "unknown key 'training.rat'"),
        (["--sweep", "training.rate"], "takes the form key=value,value"),
        (["--sweep", "training.rate="], "takes the form key=value,value"),
        (["--sweep", "training.rate=[]"], "has no values"),
        (["--sweep", "training.rate=0.1,fast"], "training.rate: got 'fast', takes a number"),
        (["--sweep", "training.rate=0.1,[0.2"], "override 'training.rate=[0.1,[0.2]'"),
        (["--sweep", "training.rate=0.1,0.10"], "two runs are the same (training.rate=0.1)"),
        (["--sweep", "training.rate=0.1", "--sweep", "training.rate=0.2"], "appears twice"),
        (["--sweep", "training.rate=0.1,0.2", "training.rate=0.3"], "is swept and also set by an override"),
        (["--sweep", "run.name=a,b"], "the folder of a run cannot be swept"),
        (["--sweep", "seed=0,1", "--seeds", "0,1"], "leave one of the two out"),
        (
            ["--sweep", "training={rate: 0.1},{rate: 0.2}", "training.rate=0.5"],
            "training.rate: is inside training, which is",
        ),
        (["--sweep", "training={rate: 0.1}", "--sweep", "training.steps=1,2"], "is inside training, which is swept, too"),
        (
            ["--sweep", "training.rate=0.1,0.2", "training={rate: 0.5}"],
            "training.rate: is swept and also set by an override",
        ),
        (["--sweep", "sites.0.samples=30,40"], "sites.0.samples: is swept and also set by an override"),
        (["--sweep", "experiment=digits,office"], "experiment: cannot be swept"),
        (["--seeds", ",".join(map(str, range(1001)))], "makes 1,001 runs, takes at most 1,000"),
        (["--seeds", ""], "--seeds: got '', takes whole numbers with commas between"),
        (["--seeds", ","], "--seeds: got ',', takes whole numbers with commas between"),
        (["--seeds", "0,x"], "seed: got 'x', takes a whole number"),
        (["--seeds", "0,0"], "two runs are the same (seed=0)"),
        (["--seeds", "0,1", "engine.name=flower"], "(the run digits-seed=0)"),
        (["--seeds", "0,1", "objective.mode=none"], "objective.mode: got 'none'"),
        (["--parallel", "2"], "--parallel: needs several runs"),
        (["seeds=0,1"], "seeds: for one run per seed, use --seeds 0,1"),
        (["seed=0,1"], "(seed of everything random); for one run per value, use --sweep seed=0,1"),
        (["training.rate=0.1,0.2"], "for one run per value, use --sweep training.rate=0.1,0.2"),
    ],
)
def test_what_cannot_be_swept_is_reported_before_anything_starts(
    fedloom: Command, tmp_path: Path, words: list[str], message: str
):
    refused(fedloom("run", "digits", *QUICK, f"run.root={tmp_path}", *words), message)
    assert not list(tmp_path.iterdir())


def test_the_runs_are_shown(fedloom: Command, tmp_path: Path):
    said = fedloom("run", "--seeds", "0,1", "--sweep", "strategy={name: sum_aggregation}", f"run.root={tmp_path}", "--show")
    assert said.code == 0
    assert len(said.out.splitlines()) == 2 and not list(tmp_path.iterdir())


def test_a_section_that_is_given_may_have_a_key_swept_that_it_leaves_out(fedloom: Command, tmp_path: Path):
    words = ["training={steps: 5}", "--sweep", "training.rate=0.1,0.2", f"run.root={tmp_path}", "--show"]
    assert len(fedloom("run", "digits", *words).out.splitlines()) == 2


def test_runs_in_one_process_leak_nothing_and_are_kept(tmp_path: Path):
    words = [*QUICK, "rounds=1"]
    found = sweep("digits", *words, f"run.root={tmp_path}", seeds=[0, 1], over={"objective.mode": ["exact", "fedavg"]})
    names = [f"digits-mode={mode}-seed={seed}" for mode in ("exact", "fedavg") for seed in (0, 1)]
    assert [result.folder.name for result in found] == names and not found.failed
    alone = load("digits", [*words, "seed=1", "objective.mode=fedavg", f"run.root={tmp_path}", "run.name=alone"])
    assert simulate(alone)["digest"] == found[3].summary["digest"]
    assert (tmp_path / "alone/config.yaml").read_text().replace("alone", names[3]) == (
        tmp_path / names[3] / "config.yaml"
    ).read_text()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = sweep("digits", *words, f"run.root={tmp_path}", seeds=[0, 1], over={"objective.mode": ["exact", "fedavg"]})
    assert again == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [group.label for group in again.compare().groups] == ["mode=exact", "mode=fedavg"]


def test_a_folder_with_another_run_is_refused(fedloom: Command, tmp_path: Path):
    simulate(load("digits", [*QUICK, "rounds=1", "seed=1", f"run.root={tmp_path}", "run.name=digits-seed=1"]))
    words = ["run", "digits", *QUICK, "rounds=2", f"run.root={tmp_path}", "--seeds", "0,1"]
    refused(fedloom(*words), "digits-seed=1", "holds a run of another configuration", "--overwrite")
    (tmp_path / "digits-seed=0").mkdir()
    refused(fedloom(*words), "digits-seed=0", "holds no run of fedloom")
    refused(fedloom(*words, "--overwrite"), "it will not be overwritten")
    assert [path.name for path in tmp_path.iterdir() if path.name != "digits-seed=1"] == ["digits-seed=0"]


BROKEN = """
import os, sys
import torch
class Net(torch.nn.Module):
    def __init__(self, fate="well"):
        super().__init__()
        self.fate, self.inner = fate, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    def forward(self, x):
        if self.training and len(x) > 2 and self.fate == "raises":
            raise ArithmeticError("as asked")
        if self.training and self.fate == "dies" and "fedloom.sims.sweeps.worker_process" in sys.modules:
            os._exit(7)
        return self.inner(x)
"""


@pytest.mark.slow
def test_runs_that_fail_stop_no_other(tmp_path: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["sites=[{domain: digits, count: 2, samples: 40}]", "data.size=8", "data.test_limit=60", "engine.name=inline",
             "network={name: 'broken:Net'}", "rounds=1", "evaluation.sites=0", f"run.root={tmp_path}"]  # fmt: skip
    said = fedloom("run", "digits", *words, "--sweep", "network.fate=dies,raises,well", "--json")
    assert said.code == 1, said.err
    runs = last_line(said)["runs"]
    assert [run["status"] for run in runs] == ["failed", "failed", "finished"]
    assert "its process ended (exit code 7)" in runs[0]["error"] and runs[1]["error"]
    assert "3 runs, " in said.err
    assert "digits-fate=dies: failed" in said.err and "digits-fate=raises: failed" in said.err


@pytest.mark.slow
def test_a_sweep_is_interrupted_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = [*QUICK, "rounds=30", "training.steps=1", "evaluation.every=30", "tracking=[csv]"]
    command, pipe = [FEDLOOM, "run", "digits", *words, "--seeds", "0,1,2", "--parallel", "2"], subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as begun:
        assert begun.stdout
        first = next(line for line in begun.stdout if "round 2/30" in line).partition(":")[0]
        begun.send_signal(signal.SIGINT)
        _, output = begun.communicate(timeout=60)
    assert begun.returncode == 130 and "run the same command again" in output
    assert not _processes_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert status(Path("runs", first)) == "interrupted" and not Path("runs/digits-seed=2").exists()
    assert Path("runs", first, "csv").is_dir()  # it was tracked
    before = read_metrics(Path("runs", first))
    found = sweep("digits", *words, seeds=[0, 1, 2])
    assert [result.summary["status"] for result in found] == ["finished"] * 3
    after = read_metrics(Path("runs", first))
    assert all(len((result.folder / "csv/main/rounds.csv").read_text().splitlines()) == 31 for result in found)
    assert before and before.items() <= after.items() and len(after) == 30  # not trained again: the same seconds
    alone = load("digits", [*words, f"seed={first[-1]}", "run.name=alone"])
    assert simulate(alone)["digest"] == read_summary(Path("runs", first))["digest"]


def test_nothing_begins_when_the_parent_is_gone_before_the_run_began(tmp_path: Path):
    config = load("digits", [*QUICK, "rounds=1", f"run.root={tmp_path}"])
    code = [sys.executable, "-P", "-c", START, "1", "1", ""]
    left = subprocess.run(code, input=to_json(config) + "\n", text=True, capture_output=True, check=False)
    assert (left.returncode, left.stdout, list(tmp_path.iterdir())) == (0, "", []), left.stderr


def test_a_full_disk_is_one_line(capfd: pytest.CaptureFixture[str]):
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/full/file")

    assert attempt(full) == "/full/file: No space left on device; free some space or correct the permissions, then resume"
    assert capfd.readouterr().err == ""
    assert attempt(lambda: {}["odd"]).startswith("KeyError") and "Traceback" in capfd.readouterr().err


def test_what_another_process_made_meanwhile_is_kept(tmp_path: Path):
    load_with = lambda words: load("digits", [*QUICK, "rounds=1", f"run.root={tmp_path}", *words])  # noqa: E731
    planned = ready(plan(load_with, [], {"seed": [0, 1, 2]}))
    for one in planned[:2]:
        simulate(one.config)
    (planned[1].folder / "summary.json").unlink()
    before = read_metrics(planned[1].folder)
    assert [one.status for one in carry_out(planned, quiet=True)] == ["kept", "finished", "finished"]
    assert read_metrics(planned[1].folder) == before  # gone on with, not trained again


def test_a_run_that_another_process_is_at_is_busy(tmp_path: Path, fedloom: Command):
    words = [*QUICK, "rounds=1", f"run.root={tmp_path}"]
    simulate(load("digits", [*words, "seed=0", "run.name=digits-seed=0"]))
    (tmp_path / "digits-seed=0" / "summary.json").unlink()
    lock = acquire(tmp_path / "digits-seed=0")
    found = sweep("digits", *words, seeds=[0, 1])
    assert [result.folder.name for result in found] == ["digits-seed=1"]
    assert found.failed == {tmp_path / "digits-seed=0": BUSY_MESSAGE}
    refused(fedloom("run", "digits", *words, "--seeds", "0,1", "--overwrite"), "is working on it")
    os.close(lock)
    found = sweep("digits", *words, seeds=[0, 1])
    assert len(found) == 2 and not found.failed


def _processes_in(folder: Path) -> list[int]:
    """Processes that work in this folder, but this one."""
    found = []
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.readlink(f"/proc/{process}/cwd") == str(folder) and process != os.getpid():
                found.append(process)
        except OSError:
            continue
    return found


def test_python_learns_what_it_takes():
    grids: list[Any] = [{}, {"rounds": 3}, {"rounds": "12"}, {"rounds": []}, {"network": [{"name": {1, 2}}]}]
    odd: list[dict[str, Any]] = [{"over": grid} for grid in grids]
    odd += [{"seeds": [0], "parallel": 0}, {"seeds": [0], "over": {"seed": [1]}}]
    for words in odd:
        with pytest.raises(UserError):
            sweep("digits", **words)
