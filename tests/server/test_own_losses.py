"""A user's function for training.loss is tried before the run; a shipped loss for other targets is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.clients.training.loss import CrossEntropy, Loss
from fedloom.conf import UserError
from fedloom.server.run.checks import check
from fedloom.sims.api import config_of
from tests.sims.other_data import cancer, diabetes, labels, next_tokens, sequences

HERE = "tests.server.test_own_losses"
FEW = {"rounds": 1, "objective": "fedavg", "strategy": "fedavg", "engine": {"name": "inline"}}


def of_any(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.dtype == torch.int64:
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return F.mse_loss(outputs, targets)


def of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def of_one(outputs: Tensor) -> Tensor:
    return outputs.sum()


def odd(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def checked(domain: str, loss: str | dict[str, Any], network: str = "mlp") -> None:
    sites = [{"domain": domain, "count": 2}]
    check(config_of({**FEW, "network": network, "sites": sites, "training": {"loss": loss}}, []))


@pytest.mark.parametrize("write", [cancer, diabetes, labels, sequences, next_tokens])
def test_a_loss_that_works_is_accepted_for_all_targets(tmp_path: Path, write):
    checked(write(tmp_path), f"{HERE}:of_any", "transformer" if write is next_tokens else "mlp")


@pytest.mark.parametrize("loss, message", [
    ("of_each", r"'.*:of_each' returned a value of shape \[4\]; it must return one number"),
    ("of_one", r"'.*:of_one' fails on outputs \[4, 2\] and targets \[4\] \(TypeError: "),
    ("odd", r"'.*:odd' returned a number without a gradient; compute it from the outputs"),
])  # fmt: skip
def test_a_loss_that_fails_is_refused_before_the_run(tmp_path: Path, loss: str, message: str):
    with pytest.raises(UserError, match=r"training\.loss: " + message):
        checked(cancer(tmp_path), f"{HERE}:{loss}")


def test_a_loss_of_numbers_for_classes_says_how_to_predict_numbers(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"'huber' is not for classes, .* cross_entropy, focal, .* task=regression behind the path"
    ):
        checked(cancer(tmp_path), "huber")


@pytest.mark.parametrize("name, key, weights, message", [
    ("focal", "class_weights", [0, 0], "all weights are 0, so nothing would be learned"),
    ("cross_entropy", "class_weights", [1, 2, 3], "got 3 weights, takes one for each of 2 outputs"),
    ("cross_entropy", "class_weights", [1, -1], r"got \[1, -1\], takes a list of numbers from 0 on, or balanced"),
    ("binary_cross_entropy", "positive_weights", [1.0], "got 1 weights, takes one for each of 3 outputs"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_before_the_run(tmp_path: Path, name: str, key: str, weights, message: str):
    with pytest.raises(UserError, match=rf"training\.loss\.{key}: " + message):
        checked((labels if name.startswith("binary") else cancer)(tmp_path), {"name": name, key: weights})


def test_balanced_weights_are_those_of_the_site_s_targets(tmp_path: Path):
    checked(cancer(tmp_path), {"name": "cross_entropy", "class_weights": "balanced"})
    found = CrossEntropy("balanced").of_site(torch.tensor([0] * 6 + [2] * 2 + [-100]), 4)
    assert isinstance(found, CrossEntropy)
    assert found.class_weights == [pytest.approx(8 / 12), 0.0, 2.0, 0.0]


class Broken(Loss):
    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        raise RuntimeError("broken\nin lines")


class OfEach(Loss):
    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return of_each(scores, targets)


class Constant(Loss):
    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return torch.tensor(1.0)


class Module(torch.nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Broken, r"fails on outputs \[4, 10\] and targets \[4\] \(RuntimeError: broken\)"),
        (OfEach, r"returned a value of shape \[4\]; it must return one number"),
        (Constant, "returned a number without a gradient"),
        (Module, "is a class; it must be a function of .outputs, targets., or a subclass of"),
    ],
)
def test_a_loss_class_of_the_users_is_tried_before_the_run(loss: type, message: str):
    tree = {**FEW, "sites": [{"domain": "digits", "samples": 40}], "network": "conv6", "training": {"loss": loss}}
    with pytest.raises(UserError, match=f"^training.loss.*'{HERE}:{loss.__name__}' {message}"):
        check(config_of(tree, []))
