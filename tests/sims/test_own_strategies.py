"""A strategy or schedule of the user's own that fails at the server: one line names it, and its own lines follow."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedloom.clients.objectives import Experiment
from fedloom.conf.sites import Site
from fedloom.server.ledger.declared import Slot
from fedloom.server.rounds.schedules import Participation, Sampling, Schedule
from fedloom.server.run_folder.listing import read_summary
from fedloom.server.strategies import Models, RoundContext, View
from fedloom.server.strategies.base import OwnStrategyError
from fedloom.server.strategies.fedavg import FedAvg
from fedloom.sims.operations.simulate import resume, simulate
from tests.server.averages import configured
from tests.sims.commands import Command

HERE = "tests.sims.test_own_strategies"


def helper(values: dict[str, int]) -> int:
    return values["weights"]


@dataclass(frozen=True)
class InRound(FedAvg):
    def round(self, context: RoundContext) -> None:
        super().round(context)
        if context.number == 2 and not ALLOWED:
            helper({})


@dataclass(frozen=True)
class InFile(FedAvg):
    def recompute_derived(self, context: RoundContext) -> None:
        Path("does/not/exist").read_text()


@dataclass(frozen=True)
class InModels(FedAvg):
    def models(self, view: View) -> Models:
        raise ZeroDivisionError("no\nnetworks")


@dataclass(frozen=True)
class InSlots(FedAvg):
    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        raise IndexError("no slots")


class Never(Sampling):
    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        raise LookupError("nobody")


@dataclass(frozen=True)
class InSchedule(FedAvg):
    def schedule(self, experiment: Experiment) -> Schedule:
        return Never(experiment.config)


ALLOWED: list[int] = []
CASES = {
    "InRound": (r"strategy: '{}:InRound' failed in round 2, in `round` \(KeyError: 'weights'; "
                r"test_own_strategies\.py, line \d+, in helper\); correct it, then resume"),
    "InFile": r"strategy: '{}:InFile' failed in round 1, in `recompute_derived` \(FileNotFoundError: .*, then resume",
    "InModels": r"strategy: '{}:InModels' failed, in `models` \(ZeroDivisionError: no; .*\); correct it, then try again",
    "InSlots": r"strategy: '{}:InSlots' failed, in `slots` \(IndexError: no slots; .*\); correct it, then try again",
    "InSchedule": r"schedule: '{}:Never' failed in round 1, in `participation` \(LookupError: nobody; .*, then resume",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_line_names_the_users_strategy_and_its_own_lines_follow(tmp_path: Path, fedloom: Command, name: str):
    words = [f"strategy={HERE}:{name}", "objective=fedavg", "sites=[{domain: digits, count: 2, samples: 30}]", "rounds=2",
             "data.size=8", "network=mlp", "engine.name=inline", "baselines=[]", f"run.root={tmp_path}"]  # fmt: skip
    said = fedloom("run", "digits", *words)
    lines = said.err.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("fedloom: "))
    assert said.code == 2 and re.fullmatch(f"fedloom: {CASES[name]}".format(HERE), lines[first])
    trace = "\n".join(lines[first + 1 :])
    assert "Traceback" not in said.err
    assert set(re.findall(r'File ".*/(\w+\.py)"', trace)) == {"test_own_strategies.py"}
    (method,) = re.findall(r"in `(\w+)`", lines[first])
    assert f", in {method}\n" in trace and trace.strip().endswith(re.findall(r"\((\w+Error: [^;]*)", lines[first])[0])


def test_a_corrected_strategy_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = configured(tmp_path, f"strategy={HERE}:InRound", "objective=fedavg", "run.name=run")
    with pytest.raises(OwnStrategyError, match="failed in round 2"):
        simulate(config)
    assert "OwnStrategyError: strategy: " in read_summary(tmp_path / "run")["error"]
    monkeypatch.setattr(f"{HERE}.ALLOWED", [1])
    assert resume(tmp_path / "run")["status"] == "finished"
