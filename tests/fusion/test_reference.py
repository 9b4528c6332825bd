"""The public implementations' numbers on one pair of MLPs: costs, map, balanced networks, plans, fused weights."""

from dataclasses import replace
from functools import cache
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.fusion.cla_ot.matching import layer_costs, optimal_alignment
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.results import Fused
from fedloom.fusion.settings import FusionSettings

NUMBERS = Path(__file__).parents[2].parent / "shared" / "reference" / "cla_ot_mlp.npz"

pytestmark = pytest.mark.skipif(not NUMBERS.is_file(), reason=f"{NUMBERS} is not there")


@cache
def numbers() -> dict[str, np.ndarray]:
    with np.load(NUMBERS) as file:
        return dict(file)


class Mlp(nn.Module):
    def __init__(self, letter: str) -> None:
        super().__init__()
        self.names = [f"fc{place}" for place in takewhile(lambda i: f"{letter}.fc{i}.weight" in numbers(), count(1))]
        for name in self.names:
            weight = torch.from_numpy(numbers()[f"{letter}.{name}.weight"])
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight = nn.Parameter(weight.clone())
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for name in self.names[:-1]:
            x = torch.relu(self.get_submodule(name)(x))
        return self.get_submodule(self.names[-1])(x)


def probe() -> Tensor:
    return torch.from_numpy(numbers()["samples"])


@cache
def fused(deeper: bool, relu: str = "sum") -> Fused:
    """A in B's basis; at A's depth (layers added to B) or at B's (layers of A merged)."""
    settings = replace(FusionSettings.reference(), relu=relu)
    return fuse([Mlp("A"), Mlp("B")], into=1, depth=0 if deeper else 1, probe=probe(), settings=settings)


def weights(network: nn.Module) -> list[np.ndarray]:
    return [tensor.detach().numpy() for tensor in network.state_dict().values()]


def compare(given: list[np.ndarray], name: str, tolerance: float) -> None:
    assert f"{name}.{len(given)}" not in numbers()
    for place, array in enumerate(given):
        np.testing.assert_allclose(array, numbers()[f"{name}.{place}"], atol=tolerance, rtol=0, err_msg=f"{name}.{place}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cost_cka", {}),
        ("cost_wd", {"dissimilarity": "wasserstein"}),
        ("cost_neurons", {"representation": "neurons"}),
    ],
)
def test_costs_and_map(name, options: dict[str, Any]):
    cost = layer_costs(Mlp("A"), Mlp("B"), probe(), **options)
    np.testing.assert_allclose(cost, numbers()[name], rtol=1e-6, atol=1e-6)


def test_map():
    assert [row + 1 for row in optimal_alignment(numbers()["cost_cka"])] == numbers()["mapping"].tolist()
    assert fused(True).alignment == ((0, 1, 2, 3, 4), (0, 1, 4))
    assert fused(False).alignment == ((0, 1, 4), (0, 1, 2))


def test_layers_added():
    result = fused(True)
    compare(weights(result.balanced[1]), "B_added", 1e-6)
    compare(weights(result.aligned[1]), "B_added", 1e-6)
    with torch.no_grad():
        assert torch.equal(result.balanced[1](probe()), Mlp("B")(probe()))


def test_plans_and_weights_with_layers_added():
    result = fused(True)
    compare([plan.numpy() for plan in result.plans[0].values()], "add_T", 1e-6)
    compare(weights(result.aligned[0]), "A_aligned_add", 1e-4)
    compare(weights(result.network), "fused_add", 1e-4)


@pytest.mark.parametrize(("relu", "name"), [("sum", "sum"), ("average", "avg")])
def test_layers_merged(relu, name):
    result = fused(False, relu)
    compare(weights(result.balanced[0]), f"A_merged_{name}", 1e-6)
    compare([plan.numpy() for plan in result.plans[0].values()], f"merge_{name}_T", 1e-6)
    compare(weights(result.network), f"fused_merge_{name}", 1e-4)


def test_ours_keeps_the_scale_that_the_public_code_loses():
    """Column sums on both sides scale the aligned logits by the product of the widths' ratios, here 32."""
    a, settings = Mlp("A"), FusionSettings(refit="none", repair=False)
    ours = fuse([a, Mlp("B")], into=1, depth=0, probe=probe(), settings=settings)
    with torch.no_grad():
        wanted = a(probe()).std()
        assert fused(True).aligned[0](probe()).std() / wanted > 10
        assert 0.2 < ours.aligned[0](probe()).std() / wanted < 2
