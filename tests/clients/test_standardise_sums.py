"""Sums by which sites standardise their examples: exact, checked, and undone in predictions."""

import numpy as np
import pytest
import torch

from fedloom.clients.data.examples import Examples
from fedloom.clients.data.form import FEATURES, SEQUENCE
from fedloom.clients.data.schema import REGRESSION, Schema
from fedloom.clients.data.standardise import (
    Standardisation,
    check_sums,
    standardised,
    sums_of,
)
from fedloom.clients.networks import HeadView
from fedloom.conf import UserError
from fedloom.fusion.wide import mean_and_deviation, wide_sums


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1.0, 1e6, 1e15])
def test_sums_are_exact_for_numbers_of_any_usual_size(size: float):
    x = (torch.randn(300, 4, generator=torch.Generator().manual_seed(1)) + torch.tensor([0.0, 3.0, 1000.0, -5.0])) * size
    total, squares = wide_sums(x)
    mean, deviation = mean_and_deviation(len(x), total, squares)
    numbers = x.double().numpy()
    assert np.allclose(mean, numbers.mean(0), rtol=1e-9, atol=1e-9 * size)
    assert np.allclose(deviation, numbers.std(0), rtol=1e-6, atol=0)
    parts = [wide_sums(part) for part in x[torch.randperm(300)].split(70)]
    both = (sum(sums for sums, _ in parts), sum(squares for _, squares in parts))
    again = mean_and_deviation(len(x), *both)  # pyright: ignore
    assert torch.equal(mean, again[0]) and torch.equal(deviation, again[1])


def test_steps_of_sequences_share_a_mean_and_targets_come_back():
    schema = Schema(SEQUENCE, REGRESSION, (5, 2))
    images = Examples(torch.randn(40, 5, 2) * 9 + 4, torch.randn(40, 1) * 70 + 150)
    by = Standardisation.parsed(Standardisation.from_sums(sums_of(images, schema)).state())
    changed = standardised(images, by)
    assert changed.x.shape == (40, 5, 2)
    assert torch.allclose(changed.x.mean((0, 1)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(changed.y.std(correction=0), torch.ones(()), atol=1e-5)
    assert torch.allclose(by.predictions(changed.y), images.y, rtol=1e-5)
    view = HeadView(torch.nn.Flatten(), slice(0, 1), "running", by).eval()
    assert torch.allclose(view(images.x), by.predictions(changed.x.flatten(1)[:, :1]))


def test_sums_that_no_examples_have_are_refused():
    images = Examples(torch.rand(9, 3) + 10, torch.zeros(9, dtype=torch.int64))
    sums = sums_of(images, schema := Schema(FEATURES, shape=(3,)))
    check_sums(sums, schema)
    check_sums(sums, schema, 9)
    for name, tensor in {"inputs.count": torch.tensor([0]), "inputs.count ": torch.tensor([1]),
                         "inputs.square": torch.zeros(10, 3, dtype=torch.int64),
                         "inputs.sum": torch.full((5, 3), 2**60)}.items():  # fmt: skip
        with pytest.raises(ValueError, match=r"'inputs|sum of squares"):
            check_sums({**sums, name.strip(): tensor}, schema)
    for count in (10, 2**31, 2**39, 2**62):  # a site of 9 examples
        with pytest.raises(ValueError, match=r"'inputs\.count' is more than the site's"):
            check_sums({**sums, "inputs.count": torch.tensor([count])}, schema, 9)
    with pytest.raises(UserError, match=r"data\.standardise: number 0 of the inputs has values beyond"):
        sums_of(Examples(torch.full((2, 1), 1e30), torch.zeros(2)), Schema(FEATURES, shape=(1,)))


def test_sums_of_inputs_and_targets_are_of_the_same_examples():
    schema = Schema(SEQUENCE, REGRESSION, (5, 2))
    sums = sums_of(Examples(torch.randn(6, 5, 2), torch.randn(6, 1)), schema)
    check_sums(sums, schema, 6)
    with pytest.raises(ValueError, match="different numbers of examples"):
        check_sums({**sums, "inputs.count": sums["inputs.count"] + 5}, schema, 9)
