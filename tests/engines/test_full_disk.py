"""In a simulation, no site is dropped for a full disk. The round ends with one line; a resumed run has the same bits."""

import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode

from fedloom.clients.objectives.averaging import FedAvgSession
from fedloom.clients.objectives.base import Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.privacy.guard import SIMULATED, STORAGE, failed
from fedloom.clients.storage.states import read_state
from fedloom.conf.errors import UserError, of_files, of_storage
from fedloom.conf.schema import Config
from fedloom.fusion.state import State, digest
from fedloom.server.run_folder.listing import read_summary
from fedloom.sims.operations.simulate import resume, simulate
from tests.server.averages import configured
from tests.server.parts import Recorder

HERE = "tests.engines.test_full_disk"
FULL = "FEDLOOM_TEST_FULL"  # the path of a file that says what is full: a site's store, or where contributions are stored
MOST = 2**20  # bytes of a file on the full disk; the run's other files are smaller
RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
RAY = ("engine.name=ray", "engine.workers=1")


class Session(FedAvgSession):
    """In round 2, site 1 fills the disk: before its own state is stored, or before its contribution is."""

    def local_state(self) -> State | None:
        return {"large": torch.zeros(400_000)} if self.fill("state", MOST) else None

    def contribution(self) -> dict[str, State]:
        self.fill("contribution", 1024)
        return super().contribution()

    def fill(self, what: str, size: int) -> bool:
        marker = Path(os.environ[FULL])
        full = marker.is_file() and marker.read_text() == what and (self.task.round, self.task.site.index) == (2, 1)
        if full:
            limit(size)
        return full


@dataclass(frozen=True)
class Objective(FedAvg):
    def session(self, task: Task) -> FedAvgSession:
        return Session(self, task)


def limit(size: int) -> None:
    """Let files of this process have no more bytes, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(FULL, str(tmp_path / "full"))
    ray.shutdown()
    yield tmp_path / "full"
    limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])


def of(root: Path, name: str, *words: str) -> Config:
    return configured(root, f"objective={HERE}:Objective", "strategy=fedavg", f"run.name={name}", *words,
                      sites="count: 4, samples: 30")  # fmt: skip


CASES = [("state", ()), ("state", RAY), ("state", (*RAY, "engine.vectorise=4")), ("contribution", RAY)]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "engine"), CASES, ids=["inline", "ray", "cohort", "sum"])
def test_a_full_disk_ends_the_round_and_drops_no_site(tmp_path: Path, marker: Path, what: str, engine: tuple[str, ...]):
    simulate(of(tmp_path, "whole", "engine.name=inline"))
    marker.write_text(what)
    listener = Recorder()
    with pytest.raises(UserError) as full:
        simulate(of(tmp_path, "run", *engine), listeners=[listener])
    marker.unlink()
    limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    where = tmp_path / "run" / ("sites" if what == "state" else "staging")
    assert str(full.value).startswith(f"{where}") and "\n" not in str(full.value)
    assert str(full.value).endswith(": File too large; free some space or correct the permissions, then resume")
    assert not [line for line in listener.messages if "dropped" in line]
    assert read_summary(tmp_path / "run")["status"] == "failed"
    resume(tmp_path / "run")
    states = [read_state(tmp_path / name / "states" / "aggregate.safetensors") for name in ("run", "whole")]
    assert all(torch.allclose(states[0][name], states[1][name], atol=1e-5) for name in states[1])
    assert digest(states[0]) == digest(states[1]) or "engine.vectorise=4" in engine  # which is equal up to rounding


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG])
def test_a_full_or_failing_disk_is_one_line_whatever_the_file(number: int):
    error = OSError(number, os.strerror(number), "/data/file")
    assert of_storage(error) == of_files(error) and of_files(error).endswith(", then resume")
    assert ("check this disk" in of_files(error)) == (number == errno.EIO)
    try:
        try:
            raise error
        except OSError:
            raise UserError("file: cannot be read") from None
    except UserError as behind:
        assert of_storage(behind) == of_files(error)


def test_other_errors_of_files_are_the_machines_only_in_the_runs_folder(tmp_path: Path):
    denied = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "run" / "sites" / "file"))
    assert of_storage(denied, tmp_path / "run") == of_files(denied) != ""
    assert of_storage(denied, tmp_path / "other") == of_storage(denied) == of_storage(ValueError("full")) == ""
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "run" / "file"))
    assert of_storage(missing, tmp_path / "run") == ""  # the server can send a lost state


@pytest.mark.parametrize(("node_config", "code"), [({SIMULATED: True, "store": "/run/sites"}, STORAGE), ({}, RAISED)])
def test_a_real_sites_full_disk_is_its_own_fault(node_config: dict[str, Any], code: int):
    message = Message(RecordDict(), 2, "train")
    message.metadata.__dict__["_message_id"] = "1"
    error = failed(OSError(errno.ENOSPC, "No space left on device", "/secret/file"), message, node_config).error
    assert error.code == code and ("/secret/file" in (error.reason or "")) == (code == STORAGE)
