"""A new name of a section drops its other settings: only those that the user has set are named."""

import warnings

import pytest

from fedloom import load
from fedloom.conf.errors import DroppedWarning
from fedloom.conf.loading import FOLDER
from fedloom.sims.api import config_of
from tests.sims.commands import Command

DIGITS = FOLDER / "digits.yaml"


@pytest.mark.parametrize(("words", "dropped"), [
    (["network.name=lenet"], ""), (["network=lenet"], ""), (["strategy.name=fedavg"], ""), (["strategy=fedavg"], ""),
    (["network.affine=true", "network.name=lenet"], "network.affine"),
    (["network={name: conv6, affine: true}", "network.name=lenet"], "network.affine"),
    (["network.name=lenet", "network.width=2"], "")])  # fmt: skip
def test_settings_of_a_shipped_experiment_are_dropped_without_a_note(fedloom: Command, words: list[str], dropped: str):
    for experiment in ("digits", str(DIGITS)):
        said = fedloom("run", experiment, *words, "--show")
        note = f"note: network.name drops these settings: {dropped}. Set those that you need after it\n" if dropped else ""
        assert said.err == note
    assert fedloom("run", "usps_mnistm", "strategy=scaffold", "--show").err == ""


def test_a_shipped_configuration_in_python_names_only_what_was_changed_in_it():
    words = ["network.name=lenet", "strategy.name=fedavg"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DroppedWarning)
        config_of(load("digits"), words)
        config_of("digits", words)
    with pytest.warns(DroppedWarning) as said:
        config_of(load("digits", "network.affine=true", "baselines=[fedavg]"), words)
    texts = [str(each.message).partition(". ")[0] for each in said]
    assert texts == ["network.name drops these settings: network.affine", "strategy.name drops these settings: baselines"]
