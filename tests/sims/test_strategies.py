"""The standard methods on one split (`fedloom reproduce strategies`); Ditto's own networks where sites measure."""

import json
from pathlib import Path

import pytest

from fedloom.sims.experiments.strategies import OWN, _config, _plain
from fedloom.sims.experiments.study import Study
from tests.sims.commands import Command, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")
SMALL = ("rounds=2", "engine.name=inline")


def rows(text: str) -> dict[str, list[str]]:
    """The cells of a table in Markdown, by its first column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def test_the_table_has_a_row_for_each_method_and_for_the_plain_loop(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "strategies", "--preset", "embedded", "--seeds", "1", "tables=fedavg,ditto,plain", *SMALL)
    said = fedloom(*words)
    assert said.code == 0, said.err
    found = rows((tmp_path / "runs/strategies-embedded/tables.md").read_text())
    measured = {name: found[name][-1] for name in ("FedAvg", "Ditto, shared network", OWN, "FedAvg, plain loop")}
    assert measured["FedAvg"] == measured["Ditto, shared network"]
    assert len(set(measured.values())) == 3 and all(measured.values())
    again = fedloom(*words)
    assert again.code == 0 and rows((tmp_path / "runs/strategies-embedded/tables.md").read_text()) == found


def test_the_plain_loop_is_run_again_with_other_settings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def figure(*words: str) -> float:
        study = Study("embedded", tmp_path, overrides=["rounds=1", *words])
        return _plain(study, _config(study, "plain", 0))[1]

    first = figure()
    kept = next(tmp_path.glob("results/plain-*.json"))
    kept.write_text(kept.read_text().replace(str(first), "0.125"))
    assert figure() == 0.125  # as it was kept
    assert figure("data.size=8") != 0.125


def test_what_the_plain_loop_does_not_do_is_reported_before_anything_runs(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "strategies", "--preset", "embedded", "--seeds", "1", "federation.fraction=0.5", *SMALL)
    refused(fedloom(*words), "federation.fraction: got 0.5", "tables=")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("looked_at", ["0", "-1"])
def test_dittos_own_networks_are_reported_also_after_a_site_was_forgotten(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: str
):
    monkeypatch.chdir(tmp_path)
    said = fedloom(
        "run", "mnist_dirichlet", "preset=[embedded,ditto]", f"evaluation.sites={looked_at}", "run.name=own", *SMALL
    )
    assert said.code == 0, said.err
    before = json.loads(Path("runs/own/summary.json").read_text())
    assert fedloom("unlearn", Path("runs/own"), "site-0003").code == 0
    after = json.loads(Path("runs/own/summary.json").read_text())
    assert before["accuracy"].keys() == after["accuracy"].keys() == {"ditto", "personal"}
    if looked_at == "-1":
        there, left = (one["per_site"]["own"]["sites"] for one in (before, after))
        assert len(there) == 20 and left == {name: one for name, one in there.items() if name != "site-0003"}
        right, images = (sum(one[key] for one in left.values()) for key in ("right", "images"))
        assert after["accuracy"]["personal"]["union"] == right / images
