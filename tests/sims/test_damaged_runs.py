"""Runs with files that cannot be read: `compare` and `runs` name them, and go on without them."""

import html
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from fedloom import compare
from fedloom.server.ledger import Ledger
from fedloom.server.run_folder.layout import CONFIG, LEDGER, LOCK, METRICS, SEAL, SUMMARY
from fedloom.server.run_folder.listing import searched
from fedloom.sims.comparison import entries
from fedloom.sims.desk.tokens import Tokens
from tests.sims.commands import ONE, Command, last_line, refused
from tests.sims.desks import API, Folder, browser

GARBAGE = bytes(range(256)) * 4


def in_its_place(file: Path) -> None:
    file.unlink()
    file.mkdir()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (CONFIG, lambda file: file.write_text("".join(file.read_text().splitlines(keepends=True)[:20])), "lacks "),
    (CONFIG, lambda file: file.write_text("version: 7\nexperiment: {digits\n"), "is not valid YAML (line"),
    (CONFIG, lambda file: file.write_text("version: 7\nexperiment: digits\n"), "lacks baselines, data, engine"),
    (CONFIG, lambda file: file.write_bytes(GARBAGE), "is not UTF-8 text"),
    (CONFIG, lambda file: file.write_bytes(b""), "is empty"),
    (CONFIG, lambda file: file.write_text("[1]"), "is not a configuration"),
    (CONFIG, in_its_place, "is a folder"),
    (CONFIG, Path.unlink, "is missing"),
    (SUMMARY, cut, "is not valid JSON"),
    (SUMMARY, lambda file: file.write_bytes(GARBAGE), "is not UTF-8 text"),
    (SUMMARY, lambda file: file.write_bytes(b""), "is empty"),
    (SUMMARY, lambda file: file.write_text("[1]"), "is not a JSON object"),
    (SUMMARY, in_its_place, "is a folder"),
    (METRICS, lambda file: file.write_bytes(GARBAGE), "is not UTF-8 text"),
    (METRICS, lambda file: file.write_text("[1]\n2\n"), "has no record of a round"),
    (METRICS, lambda file: file.write_text('{"round": 1, "metric": 5}\n'), "metric must be a table with the first"),
    (METRICS, lambda file: file.write_text('{"round": 1, "metric": {"name": []}}\n'), "metric must be a table"),
    (METRICS, in_its_place, "is a folder"),
]  # fmt: skip


@pytest.fixture
def bad(run: Path) -> Path:
    """A run with a baseline, next to the sound run, with another seed."""
    place = Path(shutil.copytree(run, run.with_name("bad")))
    tree = yaml.safe_load((place / CONFIG).read_text())
    (place / CONFIG).write_text(yaml.safe_dump(tree | {"seed": 9}, sort_keys=False))
    inner = place / "baselines" / "fedavg"
    inner.mkdir(parents=True)
    for name in (CONFIG, SUMMARY, METRICS):
        shutil.copy(place / name, inner)
    return place


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_a_damaged_file_is_named(
    fedloom: Command, run: Path, bad: Path, name: str, damage: Callable[[Path], object], message: str
):
    damage(bad / name)
    shutil.rmtree(bad / "baselines") if name != CONFIG else None
    said = last_line(fedloom("compare", run.parent, "--json"))
    assert [entry["run"] for entry in said["runs"]] == [str(run)]
    (note,) = said["notes"]
    assert str(bad) in note and name in note and message in note and note.endswith("; left out") and "\n" not in note
    listed = {row["run"]: row for row in last_line(fedloom("runs", run.parent, "--json"))["runs"]}
    assert listed.keys() == {str(run), str(bad)} and "odd" not in listed[str(run)]
    assert listed[str(bad)]["status"] == ("finished" if name == METRICS else "damaged")
    shown = fedloom("runs", run.parent)
    assert shown.code == 0 and f"| {bad} | {listed[str(bad)]['status']} |" in shown.out
    assert any(line.startswith("note: ") and str(bad) in line and message in line for line in shown.out.splitlines())
    refused(fedloom("compare", bad), "no finished run", message)


@pytest.mark.parametrize(
    ("key", "value"), [("seed", "abc"), ("seed", [1]), ("rounds", "many"), ("rounds", 2.5), ("seed", None)]
)
def test_a_run_whose_configuration_has_a_wrong_type_is_listed_as_damaged(
    fedloom: Command, run: Path, bad: Path, key: str, value: object
):
    (bad / CONFIG).write_text(yaml.safe_dump(yaml.safe_load((bad / CONFIG).read_text()) | {key: value}, sort_keys=False))
    fault = f"{CONFIG}: has {key}: {value!r}, takes whole numbers; restore it from a backup, or delete this folder"
    listed = {row["run"]: row for row in last_line(fedloom("runs", run.parent, "--json"))["runs"]}
    assert listed[str(bad)]["status"] == "damaged" and listed[str(bad)]["odd"] == [f"{bad / fault}"]
    assert fedloom("runs", run.parent).code == 0
    client, headers = desk_of(run.parent)
    assert [row["id"] for row in client.get(f"{API}/runs", headers=headers).json()] == [run.name]
    page = client.get("/", headers=headers).text
    assert f"{bad.name}/{fault}" in html.unescape(page) and str(run.parent) not in page


def test_a_damaged_baseline_is_named(run: Path, bad: Path):
    (bad / "baselines" / "fedavg" / CONFIG).write_bytes(b"")
    found, file = compare(run.parent), bad / "baselines" / "fedavg" / CONFIG
    assert len(found.runs()) == 2
    assert found.notes == (f"{file}: is empty; restore it from a backup, or delete this folder; left out",)


def test_a_run_with_a_damaged_configuration_is_not_removed(fedloom: Command, bad: Path):
    (bad / CONFIG).write_text("[1]")
    refused(fedloom("rm", bad, "--yes"), f"{bad / CONFIG}: is not a configuration; restore it")
    assert bad.is_dir()


def test_folders_of_other_programs_are_not_damaged_runs(run: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    for name, text in ((CONFIG, "lr: 0.1\n"), (METRICS, "{}\n"), (SUMMARY, "{}")):
        (other / name).write_text(text)
    (tmp_path / "config-alone").mkdir()
    (tmp_path / "config-alone" / CONFIG).write_bytes(GARBAGE)
    assert [*searched(tmp_path)] == [(run, "")]


def test_a_run_that_has_just_begun_is_not_damaged(fedloom: Command, run: Path):
    (run / SUMMARY).unlink()
    for torn in ("", '{"round": 1, "acc'):
        (run / METRICS).write_text(torn)
        (row,) = last_line(fedloom("runs", run, "--json"))["runs"]
        assert row["status"] == "stopped" and "odd" not in row


def test_of_a_running_run_the_note_says_to_wait(run: Path, bad: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(entries, "status", lambda path: "running" if path == bad else "finished")
    assert compare(run.parent).notes == (f"{bad}: left out, because it is running; compare again when it has ended",)


@pytest.mark.parametrize("complete", ["a", "b"])
@pytest.mark.parametrize("lack", [{METRICS: 1}, {METRICS: 0}, {"unlearned": ["site-0001"]}])
def test_of_equal_runs_the_complete_one_stays(run: Path, complete: str, lack: dict):
    for name in ("a", "b"):
        place = Path(shutil.copytree(run, run.parent / "both" / name))
        if name != complete and METRICS in lack:
            lines = (place / METRICS).read_text().splitlines(keepends=True)
            (place / METRICS).write_text("".join(lines[: lack[METRICS]]))
        elif name != complete:
            (place / SUMMARY).write_text(json.dumps(json.loads((place / SUMMARY).read_text()) | lack))
    left, right = (run.parent / "both" / name for name in ("a", "b"))
    for folders in ([left, right], [right, left], [run.parent / "both"]):
        found = compare(folders)
        assert [Path(folder).name for folder in found.runs()["run"]] == [complete]
        other = left if complete == "b" else right
        assert found.notes == (f"{other}: left out, because {run.parent / 'both' / complete} has the same configuration "
                               "and seed and is more complete",)  # fmt: skip


def test_costs_are_those_of_the_recorded_rounds(run: Path):
    records = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    (row,) = compare(run).as_json()["rows"]
    assert row["seconds"] == pytest.approx(math.fsum(record["seconds"] for record in records))
    assert "wall-clock time of the rounds, without the start-up" in compare(run).text()
    (run / METRICS).unlink()
    (row,) = compare(run).as_json()["rows"]
    assert (
        row["seconds"] is row["bytes_to_sites"] is None
        and "| sum_aggregation/exact | 0 | - | - | - |" in compare(run).text()
    )


def last_round(file: Path, round: float) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"round": round})]))


def summed_up(**entries: object) -> Callable[[Path], object]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


HOSTILE: list[tuple[str, Callable[[Path], object]]] = [
    (SUMMARY, summed_up(unlearned=["\ud800"])),
    (SUMMARY, summed_up(method="\udfff")),
    (SUMMARY, summed_up(per_site={"aggregate": {"sites": {ONE: 5}}})),
    (SUMMARY, summed_up(per_site={"aggregate": {"sites": {ONE: {"accuracy": "x"}}}})),
    (CONFIG, lambda file: file.write_text(file.read_text().replace("\nseed: 0\n", '\nseed: "\\ud800"\n'))),
    (CONFIG, lambda file: file.write_text(file.read_text().replace("\nseed: 0\n", "\nseed: [1]\n"))),
    (METRICS, lambda file: last_round(file, -1)),
    (METRICS, lambda file: last_round(file, 1e308)),
    *((name, pipe) for name in (CONFIG, METRICS, SUMMARY, LEDGER, f"{LEDGER}-wal", SEAL, LOCK)),
]


@pytest.mark.parametrize(("name", "damage"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_file_of_a_run_hides_no_other_run(
    fedloom: Command, run: Path, bad: Path, name: str, damage: Callable[[Path], object]
):
    damage(bad / name)
    client, headers = desk_of(run.parent)
    listed = client.get(f"{API}/runs", headers=headers)
    assert listed.status_code == 200 and run.name in {one["id"] for one in listed.json()}
    for page in ("/", "/requests", "/metrics", "/compare"):
        assert client.get(page, headers=headers).status_code == 200, page
    for page in ("rounds", "sites", "requests", "events", "chain", "certificates"):
        said = client.get(f"{API}/runs/bad/{page}", headers=headers)
        assert said.status_code in (200, 404, 409, 422), (page, said.text)
    for page in ("", "/events", "/certificates", "/requests", f"/sites/{ONE}"):
        assert client.get(f"/runs/bad{page}").status_code in (200, 404, 409, 422), page
    assert fedloom("runs", run.parent).code in (0, 1)
    assert fedloom("ledger", bad, "--check").code in (0, 1, 2)


def test_a_certificate_that_leads_to_itself_does_not_exist(run: Path):
    with Ledger.open(run, server=False) as ledger:
        ledger.receive("r1", "unlearn", [ONE], "", {})
    (run / "certificates").mkdir(exist_ok=True)
    (run / "certificates" / "r1.json").symlink_to("r1.json")
    client, headers = desk_of(run.parent)
    assert client.get(f"{API}/runs/{run.name}/certificates/r1", headers=headers).status_code == 404
    for page in ("requests/r1", "certificates"):
        assert client.get(f"/runs/{run.name}/{page}").status_code == 200


def desk_of(root: Path) -> tuple[TestClient, dict[str, str]]:
    """A desk of the runs, and the header of an operator's programs."""
    secret = Tokens(root).make("ada", "operator")
    folder = Folder(root, {"operator": secret})
    return browser(folder, "operator"), folder.bearer("operator")
