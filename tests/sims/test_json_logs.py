"""Logs as JSON lines: of the programs of a federation, of the desk, and of runs."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fedloom.sims.progress.output import line_of, wrapped
from tests.sims.commands import FEDLOOM, SMALL
from tests.sims.desks import folder_with, free_port, served

pytestmark = pytest.mark.usefixtures("blank_pictures")
JSON = {**os.environ, "FEDLOOM_LOG": "json"}
PROGRAM = (
    "import sys; print('\\x1b[92mINFO \\x1b[0m:     Starting run 1234567', flush=True); print(); "
    'print(\'{"time": "t", "message": "as it is"}\'); print(\'x\' * 40000); 1 / 0'
)

HOME = Path(__file__).parents[2]
FAILING = """
import logging.config, sys
from pathlib import Path
from fedloom.sims.desk import details
from fedloom.sims.progress.output import json_logging
from tests.sims.desks import Folder, browser

details.training_of = lambda path: 1 // 0
client = browser(Folder(Path(sys.argv[1]), {"viewer": sys.argv[2]}), "viewer")
logging.config.dictConfig(json_logging())
print(client.get("/runs/digits").status_code)
"""


def objects(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(set(one) >= {"time", "level", "message", "run"} for one in found), found
    assert all(datetime.fromisoformat(one["time"]).tzinfo == UTC for one in found)
    return found


@pytest.mark.parametrize("background", [False, True])
def test_each_line_of_a_machines_program_is_an_object(tmp_path: Path, background: bool):
    """In a terminal, and in the background, where the log is the program's output already."""
    keep = "keep_running(Path('.'), lambda: [sys.executable, '-c', sys.argv[1]])"
    code = f"from fedloom.sims.federation.programs import *; {keep}"
    log = tmp_path / "log.txt"
    log.touch()
    with log.open("ab") as file:
        output = file if background else subprocess.PIPE
        keeper = subprocess.Popen([sys.executable, "-c", code, PROGRAM], cwd=tmp_path, env=JSON, stdout=output)
    with keeper:
        while "it starts again" not in log.read_text():
            assert keeper.poll() is None
        keeper.terminate()
    lines = [one for one in log.read_text().splitlines() if one != '{"time": "t", "message": "as it is"}']
    assert len(lines) < len(log.read_text().splitlines())  # an object of the program stays as it is
    found = objects("\n".join(lines))
    assert (found[0]["level"], found[0]["message"], found[0]["run"]) == ("info", "Starting run 1234567", "1234567")
    assert {one["machine"] for one in found} == {tmp_path.name}
    assert any("ZeroDivisionError" in one["message"] for one in found)


def test_a_run_and_its_errors_are_logged_as_objects(tmp_path: Path):
    words = [FEDLOOM, "run", "digits", *SMALL, "rounds=1", f"run.root={tmp_path}", "run.name=mine"]
    done = subprocess.run(words, env=JSON, capture_output=True, text=True)
    found = objects(done.stderr)
    assert done.returncode == 0 and any(one["message"].startswith("round 1/1, ") and one["run"] == "mine" for one in found)
    failed = subprocess.run(words, env=JSON, capture_output=True, text=True)
    (error,) = objects(failed.stderr)
    assert failed.returncode == 2 and error["level"] == "error" and "the run 'mine' exists" in error["message"]
    odd = subprocess.run(words, env={**JSON, "FEDLOOM_LOG": "yaml"}, capture_output=True, text=True)
    assert odd.stderr == "fedloom: FEDLOOM_LOG: got 'yaml', takes text or json\n"


def test_the_desk_logs_objects(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, port = folder_with(finished_run, tmp_path / "runs"), free_port()
    monkeypatch.setenv("FEDLOOM_LOG", "json")
    with served(folder, port) as desk:
        desk.send_signal(signal.SIGINT)
        desk.wait(20)
        said = desk.stderr.read() if desk.stderr else b""
    assert objects(said.decode())[0]["message"].startswith("desk of ")


def test_an_error_of_the_desk_is_one_object_with_its_run(finished_run: Path, tmp_path: Path):
    folder = folder_with(finished_run, tmp_path / "runs")
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        FAILING,
        folder.root,
        folder.secrets["viewer"],
    ]  # new loggers are for a whole process
    done = subprocess.run(words, cwd=HOME, capture_output=True, text=True)
    assert done.stdout == "500\n", done.stderr
    (error,) = objects(done.stderr)
    assert (error["level"], error["run"]) == ("error", "digits")
    assert error["message"].startswith("GET /runs/digits failed\nTraceback") and "ZeroDivisionError" in error["message"]


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        ("ERROR :     it failed\n", "error", "it failed"),
        ("ERROR: no", "error", "no"),
        ("a\x1b[31mb\tc", "info", "ab c"),
    ],
)
def test_levels_are_read_as_flower_writes_them(text: str, level: str, message: str):
    found = json.loads(wrapped(text))
    assert (found["level"], found["message"], found["run"]) == (level, message, "")
    assert wrapped("  \n") == "" and json.loads(line_of('a "quoted"\nline', run="r"))["message"] == 'a "quoted"\nline'
