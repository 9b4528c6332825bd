"""The folder of a run: nothing that a user may want is ever overwritten by accident."""

import json
from pathlib import Path

import pytest
import torch

from clients.states import read_metadata, read_state
from conf import UserError, load
from server.runfolder import CONFIG, METRICS, SUMMARY, RunFolder, refuse_existing
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
    with pytest.raises(UserError, match=r"the run 'digits' exists .*pass --overwrite, or another run\.name="):
        opened(tmp_path, "seed=1")
    assert files(made.path) == before


def test_overwrite_replaces_a_run_with_all_that_was_in_it(tmp_path: Path):
    made = opened(tmp_path)
    made.append({"round": 1})
    made.write_network("old", {"w": torch.ones(1)})
    again = opened(tmp_path, "run.overwrite=true", "seed=9")
    assert set(files(again.path)) == {CONFIG, METRICS}
    assert not (again.path / METRICS).read_text()
    assert load(str(again.path / CONFIG)).seed == 9


def test_overwrite_makes_a_run_that_was_not_there(tmp_path: Path):
    assert set(files(opened(tmp_path, "run.overwrite=true").path)) == {CONFIG, METRICS}


@pytest.mark.parametrize("overwrite", ["true", "false"])
@pytest.mark.parametrize("content", ["a folder with a file", "an empty folder", "a file"])
def test_what_is_no_run_is_never_deleted(tmp_path: Path, overwrite, content):
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


def test_a_root_that_cannot_be_written_is_told(tmp_path: Path):
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
    made.write_network("aggregate", {"w": torch.tensor([1.5])}, row="sum")
    path = made.path / "states" / "aggregate.safetensors"
    assert torch.equal(read_state(path)["w"], torch.tensor([1.5]))
    assert read_metadata(path)["row"] == "sum"


def test_a_folder_of_ones_own_with_a_config_yaml_is_never_deleted(tmp_path: Path):
    config = small(tmp_path, "run.overwrite=true")
    folder(config).mkdir(parents=True)
    (folder(config) / CONFIG).write_text("model: precious\n")
    with pytest.raises(UserError, match="is no run of fedloom"):
        RunFolder(folder(config)).open(config)
    assert (folder(config) / CONFIG).read_text() == "model: precious\n"
