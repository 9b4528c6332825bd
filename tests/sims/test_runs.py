"""A run that is there, as a user meets it: its ledger, resuming it, and what is wrong with it."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedloom.server.ledger.audit import check
from fedloom.server.ledger.blobs import Blobs
from fedloom.server.ledger.request_queue import APPLIED
from tests.server.test_ledger_crash import reading_only
from tests.sims.commands import ONE, TWO, Command, events, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_the_ledger_lists_its_events(fedloom: Command, finished_run: Path):
    said = fedloom("ledger", finished_run)
    assert said.code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.out.splitlines() if line.startswith("|")]
    assert [row[2] for row in rows[2:]] == ["created", "round", "round", "round", "finished"]
    assert rows[3][3] == "round 0"


def test_a_sound_ledger_is_found_sound(fedloom: Command, finished_run: Path):
    said = fedloom("ledger", finished_run, "--check", "--json")
    assert said.code == 0
    found = last_line(said)
    assert found.keys() == {"ok", "digest", "problems", "notes"}
    assert found["ok"] and not found["problems"] and not found["notes"]
    assert found["digest"] == json.loads((finished_run / "summary.json").read_text())["digest"]
    assert json.loads(said.out) == found and said.err == ""
    assert fedloom("ledger", finished_run, "--check").out.splitlines()[0] == "no problems"


@pytest.mark.parametrize(
    "name", ["blobs/*.safetensors", "ledger.sqlite", "config.yaml", "summary.json", "states/*.safetensors", "metrics.jsonl"]
)
def test_one_flipped_byte_anywhere_is_found_and_its_file_named(fedloom: Command, run: Path, name: str):
    for path in sorted(run.glob(name))[:2]:
        content = path.read_bytes()
        place = len(content) // 2
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        said = fedloom("ledger", run, "--check", "--json")
        assert said.code == 1
        found = last_line(said)
        assert not found["ok"]
        assert any(str(path.relative_to(run)) in line for line in found["problems"]), found
        path.write_bytes(content)
    assert fedloom("ledger", run, "--check").code == 0


def test_orphans_are_pruned(fedloom: Command, run: Path):
    orphan = Blobs(run / "blobs").put({"w": torch.ones(3)})
    found = last_line(fedloom("ledger", run, "--check", "--json"))
    assert found["ok"] and orphan in found["notes"][0]
    assert fedloom("prune", run).out == f"removed: blobs/{orphan}.safetensors\n"
    assert not Blobs(run / "blobs").path(orphan).exists()
    assert last_line(fedloom("ledger", run, "--check", "--json"))["notes"] == []


def test_what_is_not_a_run_is_one_line(fedloom: Command, run: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    for command in (["resume"], ["unlearn"], ["readmit"], ["ledger"], ["verify"]):
        words = {"unlearn": [ONE], "readmit": [ONE]}.get(command[0], [])
        for path in (tmp_path / "other", tmp_path / "nowhere"):
            given = [tmp_path / "r1.json", path] if command == ["verify"] else [path, *words]
            refused(fedloom(*command, *given), str(path))
    refused(fedloom("verify", tmp_path / "r1.json", run), "r1.json: this certificate does not exist")
    refused(fedloom("verify", tmp_path / "r1.json"), "r1.json: this certificate does not exist")
    (run / "ledger.sqlite").unlink()
    for command in (["unlearn", run, ONE], ["readmit", run, ONE], ["ledger", run]):
        refused(fedloom(*command), "has no ledger")
    assert fedloom("ledger", run, "--check").code == 1


def test_resuming_a_finished_run_trains_nothing(fedloom: Command, run: Path):
    before, summary = events(run), json.loads((run / "summary.json").read_text())
    said = fedloom("resume", run, "--quiet", "--json")
    assert said.code == 0, said.err
    assert last_line(said) == summary
    assert events(run) == before


def test_an_edited_configuration_is_refused_and_changes_nothing(fedloom: Command, run: Path, tmp_path: Path):
    file = run / "config.yaml"
    text = file.read_text()
    file.write_text(text.replace("rounds: 2", "rounds: 3"))
    before = (run / "summary.json").read_bytes(), events(run)
    for words in (["resume", run], ["unlearn", run, ONE], ["readmit", run, ONE],
                  ["compose", run, "--sites", ONE, "--out", tmp_path / "net.safetensors"]):  # fmt: skip
        refused(fedloom(*words), "config.yaml: was changed after the run began: 'rounds: 3', was 'rounds: 2'")
    assert ((run / "summary.json").read_bytes(), events(run)) == before


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"status": "finished"}'])
def test_a_damaged_summary_is_written_again(fedloom: Command, run: Path, text: str):
    whole = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(text)
    assert fedloom("resume", run, "--quiet").code == 0
    times = {"seconds": 0, "resources": {}}
    assert {**json.loads((run / "summary.json").read_text()), **times} == {**whole, **times}
    (run / "summary.json").write_text(text)
    assert fedloom("unlearn", run, ONE, "--quiet").code == 0
    assert json.loads((run / "summary.json").read_text())["unlearned"] == [ONE]
    assert check(run) == []


def test_a_request_outlives_results_that_were_edited(fedloom: Command, run: Path):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "classes": "none", "seconds": [], "accuracy": 3}))
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write("[" * 100_000 + "\n")
    assert fedloom("unlearn", run, ONE, "--quiet").code == 0
    assert check(run) == []


def test_the_ledger_answers_in_json(fedloom: Command, run: Path):
    assert [one["kind"] for one in last_line(fedloom("ledger", run, "--json"))["events"]] == events(run)
    assert last_line(fedloom("prune", run, "--json")) == {"removed": []}
    assert fedloom("prune", run).out == "nothing to remove\n"


def test_a_run_is_the_same_by_any_path(fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "mine").symlink_to(run)
    assert fedloom("unlearn", tmp_path / "mine", ONE, "--repair", 1, "--quiet").code == 0
    monkeypatch.chdir(run)
    assert fedloom("unlearn", ".", TWO, "--repair", 1, "--quiet").code == 0
    assert fedloom("resume", ".", "--quiet").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [APPLIED, "digits", "mine"]
    assert not [path for path in run.rglob("*") if TWO in path.name or path.name == "digits"]
    assert check(run) == []


@pytest.fixture
def guarded(finished_run: Path) -> Iterator[Path]:
    """A copy of the run in a folder that this process, whoever runs it, can be kept from writing."""
    root = Path(tempfile.mkdtemp(prefix="fedloom-"))
    root.chmod(0o755)
    yield Path(shutil.copytree(finished_run, root / "digits"))
    shutil.rmtree(root)


def test_a_folder_that_cannot_be_written_can_be_looked_at(fedloom: Command, guarded: Path):
    fedloom("unlearn", guarded, TWO, "--request-id", "r1")
    before = {path: path.read_bytes() for path in guarded.rglob("*") if path.is_file()}
    with reading_only(guarded):
        for words in (["resume", guarded, "--quiet"], ["unlearn", guarded, ONE], ["readmit", guarded, TWO],
                      ["prune", guarded]):  # fmt: skip
            refused(fedloom(*words), "ermission")
        assert fedloom("ledger", guarded).code == 0
        assert fedloom("ledger", guarded, "--check").code == 0
        assert fedloom("verify", guarded / "certificates/r1.json", guarded).code == 0
    assert {path: path.read_bytes() for path in guarded.rglob("*") if path.is_file()} == before
