"""Standard output that cannot take what is written: nothing hangs on it but the output itself."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom import run
from fedloom.sims.progress.output import Lenient, lenient
from tests.sims.test_api import TREE

FEDLOOM = [sys.executable, "-m", "fedloom.sims.cli"]
CONFIGURATION = """
sites: [{domain: digits, samples: 40, name: clinic}, {domain: digits, samples: 40, invert: true}]
rounds: 1
data: {size: 8, test_limit: 60}
network: {name: mlp, widths: [16]}
objective: sum_aggregation
strategy: sum_aggregation
engine: inline
"""


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    (tmp_path / "small.yaml").write_text(CONFIGURATION)
    return [*FEDLOOM, "run", str(tmp_path / "small.yaml"), f"run.root={tmp_path}"]


def test_what_an_encoding_lacks_is_replaced_and_the_report_is_written(small: list[str], tmp_path: Path):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(small, env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert b"8.3% ? 8.3%" in done.stdout or b"% ? " in done.stdout
    assert (tmp_path / "small" / "report.html").is_file()


def test_a_run_continues_when_no_one_reads_its_output_any_more(small: list[str], tmp_path: Path):
    piped = subprocess.Popen(small, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert piped.stdout and piped.stderr
    piped.stdout.close()
    assert piped.stderr.read() == b"" and piped.wait() == 0
    assert (tmp_path / "small" / "report.html").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_run_continues_where_its_output_finds_no_room_and_says_so_at_the_end(small: list[str], tmp_path: Path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(small, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "fedloom: standard output: No space left on device; the output is incomplete\n"
    assert (tmp_path / "small" / "report.html").is_file()


@pytest.mark.parametrize("words", [["options"], ["--help"], ["experiments"], ["run", "--help"]])
def test_a_closed_pipe_and_closed_files_end_no_command_in_a_traceback(words: list[str]):
    piped = subprocess.Popen([*FEDLOOM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert piped.stdout and piped.stderr
    piped.stdout.close()
    assert piped.stderr.read() == b"" and piped.wait() == 0
    command = f"{sys.executable} -m fedloom.sims.cli {' '.join(words)} >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0


@pytest.mark.usefixtures("blank_pictures")
def test_from_python_a_run_tells_what_its_output_can_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii", errors="strict", write_through=True))
    assert run(TREE, f"run.root={tmp_path}", "run.name=a", progress=True).report.is_file()
    assert b"% ? " in held.getvalue()


def test_a_stream_writes_what_it_can():
    stream = Lenient(io.TextIOWrapper(raw := io.BytesIO(), encoding="latin-1"))
    assert stream.write("1 → 2é") == 6
    stream.flush()
    assert raw.getvalue() == "1 ? 2é".encode("latin-1") and stream.encoding == "latin-1"
    closed = io.StringIO()
    closed.close()
    lost = lenient(closed)
    assert lost.write("x") == 1 and lenient(lost) is lost and lost.fault == ""  # type: ignore[attr-defined]
    assert lenient(None).write("x") == 1
