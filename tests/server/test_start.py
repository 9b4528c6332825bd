"""Networks that start from a file of the user's, and parts of networks that stay as they start, to the last bit."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.clients.networks import architecture_of
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import resolve
from fedloom.clients.storage.states import read_state, write_state
from fedloom.conf import Config, UserError
from fedloom.fusion.state import State
from fedloom.server.run.checks import check as refuse
from fedloom.sims.operations.options import table
from fedloom.sims.operations.simulate import absolute_paths, simulate
from tests.server.parts import Recorder, folder
from tests.server.resumes import configured, metrics, results, resumed, run, stopped

AVERAGING = ["objective.name=fedavg", "strategy.name=fedavg", "evaluation.every=4"]
TINY = 2.0**-9 / 3  # a float32 of this size has bits below the unit of the exact sums


class Small(nn.Module):
    """A user's network. `still`: its first layer does not train, by requires_grad."""

    def __init__(self, num_classes: int, size: int, still: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * (size - 2) ** 2, num_classes)
        with torch.no_grad():
            self.first.weight.mul_(TINY)
        self.first.requires_grad_(not still)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.norm(self.first(images)).relu().flatten(1))


def own(*words: str) -> list[str]:
    return [f"network={{name: 'tests.server.test_start:Small', {', '.join(words)}}}"]


@functools.cache
def weights() -> State:
    """A state of a user's, as torch saves it, with small and large entries."""
    torch.manual_seed(1)
    state = Small(10, 8).state_dict()
    return {name: tensor * 0.7 + 0.1 if "running" in name else tensor for name, tensor in state.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(weights(), tmp_path / "net.pt")
    return tmp_path / "net.pt"


def state(config: Config, name: str = "aggregate") -> State:
    return read_state(folder(config) / f"states/{name}.safetensors")


def unmoved(found: State, start: State, part: str = "extractor.") -> dict[str, bool]:
    return {name: torch.equal(tensor, start[name]) for name, tensor in found.items() if name.startswith(part)}


FROZEN = [
    AVERAGING,
    [*AVERAGING, "strategy.name=fedadam"],
    [*AVERAGING, "objective.name=scaffold", "strategy.name=scaffold", "training.momentum=0"],
    [*AVERAGING, "objective.name=fednova", "strategy.name=fednova"],
    [*AVERAGING, "objective.name=fedprox", "strategy.name=fedprox"],
    [*AVERAGING, "objective.name=ditto", "strategy.name=ditto"],
    [*AVERAGING, "strategy.name='flwr.serverapp.strategy:FedAvg'"],
    [*AVERAGING, "privacy.clip=1", "privacy.noise=0.5"],
    [*AVERAGING, "federation.secure_aggregation=true", "strategy.weighting=equal"],
    [*AVERAGING, "federation.packed=bf16"],
]


@pytest.mark.parametrize("words", FROZEN, ids=[" ".join(words[3:]) for words in FROZEN])
def test_frozen_parts_stay_as_the_file_has_them(tmp_path: Path, file: Path, words: list[str]):
    config = configured(tmp_path, *words, *own(f"start: {file}", "freeze: ['extractor.*']"))
    run(config)
    begin, found = weights(), state(config)
    assert begin["first.weight"].abs().max() < TINY
    assert all(
        torch.equal(tensor, begin[name.removeprefix("extractor.")]) for name, tensor in found.items() if "head" not in name
    )
    assert not torch.equal(found["head.weight"], begin["fc.weight"])


@pytest.mark.parametrize(
    "words", [AVERAGING, ["objective.mode=exact"], ["objective.mode=fedavg"], ["objective.mode=independent"]]
)
def test_weights_without_gradients_do_not_drift_through_the_sums(tmp_path: Path, words: list[str]):
    states = []
    for rounds in (1, 4):
        run(config := configured(tmp_path / str(rounds), *words, f"rounds={rounds}", *own("still: true")))
        states += [state(config, name.stem) for name in (folder(config) / "states").glob("*.safetensors")]
    first, *others = [found["extractor.first.weight"] for found in states]
    assert first.any() and all(torch.equal(first, other) for other in others)
    moved = [found["head.weight"] for found in states]
    assert not torch.equal(moved[0], moved[-1])


def test_with_an_averaging_method_they_are_those_of_the_module(tmp_path: Path):
    run(config := configured(tmp_path, *AVERAGING, *own("still: true")))
    network = architecture_of(config).build()
    assert not unmoved(state(config), network.state_dict())["extractor.norm.weight"]
    assert unmoved(state(config), initial_state(config, exact=True), "extractor.first") == {
        "extractor.first.bias": True, "extractor.first.weight": True}  # fmt: skip


def test_a_run_that_was_stopped_keeps_the_start(tmp_path: Path, file: Path):
    words = ["objective.mode=exact", *own(f"start: {file}", "freeze: ['*.norm.*']")]
    run(whole := configured(tmp_path / "whole", *words))
    halves = stopped(configured(tmp_path / "halves", *words), 2)
    resumed(halves)
    assert results(folder(halves)) == results(folder(whole))


def test_what_fits_is_taken_and_the_rest_is_listed(tmp_path: Path):
    file = tmp_path / "net.safetensors"
    write_state(file, {"extractor.first.weight": weights()["first.weight"].half(), "fc.weight": torch.zeros(3, 3),
                       "more": torch.ones(2)})  # fmt: skip
    listener = Recorder()
    config = configured(tmp_path, *AVERAGING, *own(f"start: {file}", "freeze: ['extractor.first.weight']"))
    run(config, listener)
    at = listener.messages.index(f"network.start: 1 of 8 tensors start from {file}")
    rows = [line.split("  ") for line in listener.messages[at + 1 : at + 10]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["tensor", "in the file", "in the network"]
    assert ["head.weight", "[3, 3]", "[10, 144]"] in cells and ["more", "[2]", "-"] in cells
    assert ["extractor.norm.weight", "-", "[4]"] in cells
    assert torch.equal(state(config)["extractor.first.weight"], weights()["first.weight"].half().float())


def test_the_weights_of_a_run_are_a_start_for_another(tmp_path: Path):
    run(first := configured(tmp_path / "first", *AVERAGING))
    start = folder(first) / "states/aggregate.safetensors"
    second = configured(tmp_path / "second", *AVERAGING, f"network.start={start}", "training.rate=0.0", "evaluation.every=1")
    run(second)
    assert all(torch.allclose(tensor, state(first)[name], atol=1e-9) for name, tensor in state(second).items())
    assert metrics(folder(second))[0]["accuracy"] == metrics(folder(first))[-1]["accuracy"]


def test_workers_of_ray_and_vectorised_sites_start_and_freeze_too(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = [
        "objective.mode=exact",
        f"network={{name: mlp, widths: [8], start: {tmp_path / 'mlp.pt'}, freeze: ['extractor.*']}}",
    ]
    base = configured(tmp_path / "inline", "network={name: mlp, widths: [8]}")
    torch.save({"state_dict": architecture_of(base).made().state_dict()}, tmp_path / "mlp.pt")
    found = []
    for name, more in {"inline": ["engine.name=inline"], "ray": ["engine.name=ray", "engine.workers=1"]}.items():
        config = configured(tmp_path / name, *words, *more)
        simulate(config)
        found.append(results(folder(config))["states"])
    assert found[0] == found[1]


def test_a_relative_path_is_of_the_current_folder(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = absolute_paths(configured(tmp_path, *own("start: net.pt")))
    assert config.network["start"] == str(file)


class Loud:
    """What a file must not be able to do."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


ODD_FILES = ("ODD", "OTHER", "NAN", "SPARSE", "META", "FOLDER", "PIPE")


def _pickled(path: Path) -> str:
    torch.save({"weight": Loud()}, path / "loud.pt")
    return str(path / "loud.pt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["start: nothing.pt"], "network.start: nothing.pt cannot be read"),
        (["start: LOUD"], "loud.pt cannot be loaded; save only the weights"),
        (["start: ODD"], "odd.pt has no state_dict of dense tensors; save one"),
        (["start: SPARSE"], "sparse.pt has no state_dict of dense tensors; save one"),
        (["start: META"], "meta.pt has no state_dict of dense tensors; save one"),
        (["start: PIPE"], "pipe.pt is a device or a pipe; name a file"),
        (["start: FOLDER"], "folder.pt cannot be read .Is a directory"),
        (
            ["start: OTHER"],
            r"no tensor in .*other.pt fits the network by name and shape; the file has weight \[3\], the network",
        ),
        (["start: NAN"], "tensor 'fc.bias' has NaN or infinite values"),
        (["start: 3"], "network.start: got 3"),
        (["freeze: ['layer.*']"], r"network.freeze: 'layer.\*' matches no tensor of the network; it has extractor"),
        (["freeze: ['*']"], "network.freeze: the patterns match all trainable weights"),
        (["freeze: extractor"], "network.freeze: got 'extractor', takes a list of texts"),
    ],
)
def test_what_cannot_start_or_freeze_is_refused_in_one_line(tmp_path: Path, capsys, words: list[str], message: str):
    torch.save([1, 2], tmp_path / "odd.pt")
    torch.save({"fc.bias": torch.ones(10).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"fc.bias": torch.ones(10, device="meta")}, tmp_path / "meta.pt")
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    torch.save({"weight": torch.ones(3)}, tmp_path / "other.pt")
    torch.save({"fc.bias": torch.full((10,), torch.nan)}, tmp_path / "nan.pt")
    files = {"LOUD": _pickled(tmp_path), **{name: str(tmp_path / f"{name.lower()}.pt") for name in ODD_FILES}}
    words = [
        (files.get(word.removeprefix("start: "), "") and f"start: {files[word.removeprefix('start: ')]}") or word
        for word in words
    ]
    with pytest.raises(UserError, match=message) as error:
        refuse(configured(tmp_path, *AVERAGING, *own(*words)))
    assert "\n" not in str(error.value) and "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.mode=regularised"], "network.freeze: objective 'sum_aggregation' moves all weights"),
        (["objective.mode=exact", "federation.packed=bf16"], "changes them with federation.packed"),
        (["objective.mode=exact", "privacy.clip=1", "privacy.noise=1"], "changes them with privacy.noise"),
        ([*AVERAGING, "evaluation.statistics=recomputed"], "changes frozen BatchNorm layers"),
    ],
)
def test_methods_that_would_move_frozen_parts_are_refused(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        refuse(configured(tmp_path, *words, *own("freeze: ['extractor.*']")))


def test_a_real_site_opens_no_file_that_a_server_names(tmp_path: Path, file: Path):
    sum_of = configured(tmp_path, "objective.mode=exact", *own(f"start: {file}"))
    with pytest.raises(UserError, match=r"network.start: sites of a real federation do not have this file, and objective"):
        resolve(sum_of).check_start()
    resolve(configured(tmp_path, *AVERAGING, *own(f"start: {file}"))).check_start()
    flower = dataclasses.replace(sum_of, engine=dataclasses.replace(sum_of.engine, name="flower"))
    with pytest.raises(UserError, match=r"network.start: sites of a real federation"):
        refuse(flower)


def test_the_options_are_listed():
    assert {"start", "freeze"} <= {str(row[0]) for row in table("network.mlp").rows}
