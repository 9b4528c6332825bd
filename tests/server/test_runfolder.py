"""The folder of a run: nothing that a user may want is ever overwritten by accident."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from fedloom.clients.data.form import Form
from fedloom.clients.networks import Architecture, Model
from fedloom.clients.objectives.heterogeneous import ALONE, EXCLUSIVE
from fedloom.clients.objectives.local import BACKWARD, FORWARD, TOGETHER
from fedloom.clients.objectives.modes import MODES
from fedloom.clients.storage.states import read_metadata, read_state
from fedloom.conf import UserError, load
from fedloom.conf.sites import BEST, PERSONAL, RESULT_NAMES
from fedloom.server.ledger.database import acquire
from fedloom.server.run_folder.folder import CONFIG, METRICS, SUMMARY, RunFolder, refuse_existing
from fedloom.server.run_folder.layout import (
    BASELINES,
    PLOTS,
    RETRAINED,
    STATES,
    WRITTEN_NAMES,
    delete,
    links_in,
    own_in,
    strange_in,
)
from fedloom.sims.sweeps.plan import Planned, placed
from tests.server.parts import files, folder, small


def opened(root: Path, *overrides: str) -> RunFolder:
    config = small(root, *overrides)
    made = RunFolder(folder(config))
    made.open(config)
    return made


def test_a_new_run_holds_its_configuration_which_loads_again(tmp_path: Path):
    config = small(tmp_path, "seed=7")
    made = opened(tmp_path, "seed=7")
    again = load(str(made.path / CONFIG))
    assert again.seed == 7
    assert again.sites == config.sites
    assert again.training == config.training


def test_an_existing_run_is_refused_and_left_as_it_is(tmp_path: Path):
    made = opened(tmp_path)
    made.append({"round": 1})
    before = files(made.path)
    with pytest.raises(UserError, match=r"the run 'digits' exists .*add --overwrite, or set another run\.name="):
        opened(tmp_path, "seed=1")
    assert files(made.path) == before


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_is_not_a_run_is_refused_without_a_hint_to_overwrite_it(tmp_path: Path, what: str):
    config = small(tmp_path)
    path = Path(config.run.root) / config.run.name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if what == "folder" else path.write_text("notes")
    fault = "exists, and holds no run of fedloom; set another run.name=, or move it away"
    with pytest.raises(UserError, match=rf"digits: {fault}$"):
        opened(tmp_path)
    with pytest.raises(UserError, match=rf"digits: {fault}$"):
        placed(Planned(config, {}), overwrite=False)


def model(weight: torch.Tensor) -> Model:
    return Model(Architecture("{}", Form.images(1, 8, 10)), {"w": weight})


def test_overwrite_replaces_a_run_with_all_that_was_in_it(tmp_path: Path):
    made = opened(tmp_path)
    made.append({"round": 1})
    made.write_network("old", model(torch.ones(1)))
    again = opened(tmp_path, "run.overwrite=true", "seed=9")
    assert set(files(again.path)) == {CONFIG, METRICS, WRITTEN_NAMES}
    assert not (again.path / METRICS).read_text()
    assert load(str(again.path / CONFIG)).seed == 9


def test_a_run_at_work_is_not_overwritten_and_nothing_is_left_beside_it(tmp_path: Path):
    made = opened(tmp_path)
    lock = acquire(made.path)
    before = files(tmp_path)
    with pytest.raises(UserError, match="is working on it"):
        opened(tmp_path, "run.overwrite=true")
    os.close(lock)
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"status": "finished"}', '{"seconds": "long"}'])
def test_a_damaged_summary_is_none(tmp_path: Path, text: str):
    made = opened(tmp_path)
    (made.path / SUMMARY).write_text(text)
    assert isinstance(made.summary(), dict)


def test_an_edited_configuration_is_reported_by_the_line(tmp_path: Path):
    made, file = opened(tmp_path), tmp_path / "digits" / CONFIG
    text = file.read_text()
    made.check(text)
    file.write_text(text.replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match=r"config\.yaml: was changed after the run began: 'seed: 1', was 'seed: 0'"):
        made.check(text)
    file.write_text(text + "more: 1\n")
    with pytest.raises(UserError, match="'more: 1', was nothing"):
        made.check(text)


def test_overwrite_makes_a_run_that_was_not_there(tmp_path: Path):
    assert set(files(opened(tmp_path, "run.overwrite=true").path)) == {CONFIG, METRICS, WRITTEN_NAMES}


@pytest.mark.parametrize("overwrite", ["true", "false"])
@pytest.mark.parametrize("content", ["a folder with a file", "an empty folder", "a file"])
def test_what_is_not_a_run_is_never_deleted(tmp_path: Path, overwrite, content):
    place = tmp_path / "digits"
    if content == "a file":
        place.write_text("precious")
    else:
        place.mkdir()
    if content == "a folder with a file":
        (place / "thesis.tex").write_text("precious")
    before = files(tmp_path)
    with pytest.raises(UserError, match="digits"):
        opened(tmp_path, f"run.overwrite={overwrite}")
    assert files(tmp_path) == before
    assert place.exists()


def test_runs_of_other_names_are_not_touched(tmp_path: Path):
    other = opened(tmp_path, "run.name=other")
    before = files(other.path)
    opened(tmp_path)
    opened(tmp_path, "run.overwrite=true")
    assert files(other.path) == before


def test_a_root_that_cannot_be_written_is_reported(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/runs/digits: cannot be written \(Not a directory\).*run\.root"):
        opened(tmp_path / "file" / "runs")


def test_an_existing_run_is_refused_before_anything_is_started(tmp_path: Path):
    config = small(tmp_path)
    refuse_existing(config)
    opened(tmp_path)
    with pytest.raises(UserError, match="exists"):
        refuse_existing(config)
    refuse_existing(small(tmp_path, "run.overwrite=true"))


def test_a_run_to_resume_is_left_as_it_is_and_one_that_is_missing_is_made(tmp_path: Path):
    refuse_existing(small(tmp_path, "run.resume=true"))
    made = opened(tmp_path, "run.resume=true")
    assert set(files(made.path)) == {CONFIG, METRICS, WRITTEN_NAMES}
    assert not load(str(made.path / CONFIG)).run.resume  # an order, no part of what the run is
    made.append({"round": 1})
    before = files(made.path)
    refuse_existing(small(tmp_path, "run.resume=true"))
    opened(tmp_path, "run.resume=true")
    opened(tmp_path, "run.resume=true", "run.overwrite=true")
    assert files(made.path) == before
    made.path.rename(tmp_path / "elsewhere")  # a run may be moved, and resumed there
    opened(tmp_path, "run.resume=true", "run.name=elsewhere")
    assert files(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("other", ["seed=1", "network.width=0.5", "sites.0.rotation=90"])
def test_a_run_of_another_configuration_is_not_the_one_to_resume(tmp_path: Path, other):
    made = opened(tmp_path)
    before = files(made.path)
    config = small(tmp_path, other, "run.resume=true")
    for refuse in (refuse_existing, made.open):
        with pytest.raises(UserError, match=r"digits: was run with another configuration \(config\.yaml\)"):
            refuse(config)
    assert files(made.path) == before


def test_records_that_a_crash_left_whole_are_read_again(tmp_path: Path):
    made = opened(tmp_path)
    assert made.metrics() == {}
    written = [{"round": 1, "train_loss": 0.1}, {"round": 2, "dropped": {"site-0000": "ä"}}]
    for record in written:
        made.append(record)
    with (made.path / METRICS).open("ab") as file:
        file.write(b'[3]\nnull\n{"rou": 1}\n\x00\xff\xfe\n{"round": 3, "train_lo')
    assert made.metrics() == {1: written[0], 2: written[1]}
    made.write_metrics(made.metrics().values())
    assert made.metrics() == {1: written[0], 2: written[1]}
    assert (made.path / METRICS).read_bytes().count(b"\n") == 2
    (made.path / METRICS).unlink()
    assert made.metrics() == {}


def test_results_are_the_digests_of_what_came_out(tmp_path: Path):
    made = opened(tmp_path)
    made.write_summary({"status": "finished"})
    made.write_network("aggregate", model(torch.ones(1)))
    (made.path / "report.html").write_text("")
    first = made.results()
    assert list(first) == sorted([CONFIG, METRICS, SUMMARY, "states/aggregate.safetensors"])
    assert all(hashlib.sha256((made.path / name).read_bytes()).hexdigest() == content for name, content in first.items())
    made.append({"round": 1})
    assert {name for name, content in made.results().items() if content != first[name]} == {METRICS}


def test_records_become_lines_in_their_order(tmp_path: Path):
    made = opened(tmp_path)
    written = [{"round": 1, "accuracy": {"union": 0.5}}, {"round": 2, "dropped": {"site-0000": 'said "ä"\n'}}]
    for record in written:
        made.append(record)
    lines = (made.path / METRICS).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == written


def test_a_summary_replaces_the_one_before(tmp_path: Path):
    made = opened(tmp_path)
    made.write_summary({"status": "interrupted", "long": "x" * 1000})
    made.write_summary({"status": "finished"})
    assert json.loads((made.path / SUMMARY).read_text()) == {"status": "finished"}


def test_networks_are_written_as_safetensors_with_what_they_are(tmp_path: Path):
    made = opened(tmp_path)
    made.write_network("aggregate", model(torch.tensor([1.5])), display_name="sum")
    path = made.path / "states" / "aggregate.safetensors"
    assert torch.equal(read_state(path)["w"], torch.tensor([1.5]))
    assert read_metadata(path)["display_name"] == "sum"


def test_a_folder_of_the_user_with_a_config_yaml_is_never_deleted(tmp_path: Path):
    config = small(tmp_path, "run.overwrite=true")
    folder(config).mkdir(parents=True)
    (folder(config) / CONFIG).write_text("model: precious\n")
    with pytest.raises(UserError, match="is not a run of fedloom"):
        RunFolder(folder(config)).open(config)
    assert (folder(config) / CONFIG).read_text() == "model: precious\n"


def test_no_site_may_be_called_what_the_results_call_something_else():
    rows = {*MODES, *(mode.display_name for mode in MODES.values()), TOGETHER, FORWARD, BACKWARD, ALONE, EXCLUSIVE}
    assert rows | {"aggregate", "star", "composed", "half", "mean", "fused", BEST, PERSONAL} == RESULT_NAMES


def test_only_what_an_interrupted_write_left_is_swept(tmp_path: Path):
    left = tmp_path / f".summary.json-{'a' * 32}"
    mine = [tmp_path / ".my-notes", tmp_path / "states" / ".also-mine", tmp_path / f".folder-{'b' * 32}" / "note"]
    for path in (left, *mine):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    RunFolder(tmp_path).sweep()
    assert not left.exists() and all(path.is_file() for path in mine)


@pytest.mark.parametrize("notes", ["", "{}", "torn"])
def test_without_notes_of_what_reports_wrote_the_endings_decide(tmp_path: Path, notes: str):
    made = opened(tmp_path)
    (made.path / WRITTEN_NAMES).write_text(notes)
    plots = made.path / PLOTS
    plots.mkdir()
    for name in ("accuracy.png", "notes.txt"):
        (plots / name).touch()
    made.note_written(["plots/classes.png"])
    (plots / "mine.png").touch()
    delete(made.path, PLOTS)
    assert {path.name for path in plots.iterdir()} == {"notes.txt", "mine.png"}


def test_only_networks_that_the_run_wrote_are_deleted(tmp_path: Path):
    made = opened(tmp_path)
    states = made.path / STATES
    made.note_networks(["aggregate", "site-0000"])
    for name in ("aggregate", "site-0000", "mine"):
        (states / f"{name}.safetensors").parent.mkdir(exist_ok=True)
        (states / f"{name}.safetensors").touch()
    (states / "deeper").mkdir()
    assert f"{STATES}/mine.safetensors" not in made.results()
    delete(made.path, STATES)
    assert {path.name for path in states.iterdir()} == {"mine.safetensors", "deeper"}


def test_in_a_run_of_an_earlier_version_the_endings_of_networks_decide_until_one_is_written(tmp_path: Path):
    made = opened(tmp_path)
    (made.path / WRITTEN_NAMES).write_text('["plots/accuracy.png"]')
    states = made.path / STATES
    states.mkdir()
    (states / "earlier.safetensors").touch()
    assert [path.name for path in own_in(made.path, STATES)] == ["earlier.safetensors"]
    made.note_networks(["aggregate"])
    (states / "mine.safetensors").touch()
    assert [path.name for path in own_in(made.path, STATES)] == ["earlier.safetensors"]


def test_links_to_other_runs_are_not_followed(tmp_path: Path):
    other, made = opened(tmp_path / "other"), opened(tmp_path / "made")
    before = files(other.path)
    (made.path / BASELINES / "own").mkdir(parents=True)
    for link in (f"{BASELINES}/linked", f"{BASELINES}/own/{STATES}", RETRAINED):
        (made.path / link).symlink_to(other.path)
    assert {str(link.relative_to(made.path)) for link in links_in(made.path / BASELINES)} == {
        f"{BASELINES}/linked", f"{BASELINES}/own/{STATES}"}  # fmt: skip
    assert not strange_in(made.path, {})
    delete(made.path, BASELINES)
    assert files(other.path) == before and (made.path / BASELINES / "linked").is_symlink()
