"""Fisher's discriminant from sums: what it is by definition, and that it depends on nothing but the sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.conf.errors import UserError
from fedloom.fusion.discriminant import RIDGE, discriminant


def statistics(x: torch.Tensor, y: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    one = torch.nn.functional.one_hot(y, classes).double()
    return one.mean(0), one.T @ x / len(x), x.T @ x / len(x)


def drawn(seed: int, classes: int, size: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (number,), generator=generator)
    middles = 2.0 * torch.randn(classes, size, generator=generator).double()
    return middles[y] + torch.randn(number, size, generator=generator).double(), y


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), classes=st.integers(2, 5), size=st.integers(1, 6))
def test_its_logits_are_the_gaussians_log_probabilities(seed, classes, size):
    x, y = drawn(seed, classes, size, 200)
    weight, bias = discriminant(*statistics(x, y, classes))
    there = [k for k in range(classes) if bool((y == k).any())]
    means = torch.stack([x[y == k].mean(0) for k in there])
    rest = x - means[torch.tensor([there.index(int(k)) for k in y])]
    within = rest.T @ rest / len(x)
    within += RIDGE * within.diagonal().mean() * torch.eye(size)
    gaussians = [torch.distributions.MultivariateNormal(mean, within).log_prob(x) for mean in means]
    shares = torch.stack([(y == k).double().mean() for k in there]).log()
    wanted = (torch.stack(gaussians, 1) + shares).log_softmax(1)
    assert torch.allclose((x @ weight.T + bias)[:, there].log_softmax(1), wanted, atol=1e-6)


def test_sites_together_give_what_all_images_give():
    x, y = drawn(3, 4, 5, 300)
    parts = [slice(0, 50), slice(50, 90), slice(90, 300)]
    sizes = [len(y[part]) / 300 for part in parts]
    each = [statistics(x[part], y[part], 4) for part in parts]
    count, total, square = (
        torch.stack([size * one[k] for size, one in zip(sizes, each, strict=True)]).sum(0) for k in range(3)
    )
    for mine, wanted in zip(discriminant(count, total, square), discriminant(*statistics(x, y, 4)), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-9)


def test_a_class_without_images_is_never_the_answer():
    x, y = drawn(5, 3, 4, 100)
    weight, bias = discriminant(*statistics(x, y, 5))
    assert int((x @ weight.T + bias).argmax(1).max()) <= 2 and bool(torch.isfinite(bias).all())


def test_what_no_images_give_leaves_finite_numbers_or_is_refused():
    weight, bias = discriminant(torch.tensor([0.5, 0.5]), torch.randn(2, 3), -torch.eye(3))
    assert bool(torch.isfinite(weight).all() and torch.isfinite(bias).all())
    with pytest.raises(UserError, match="no class has an image"):
        discriminant(torch.zeros(2), torch.zeros(2, 3), torch.eye(3))
