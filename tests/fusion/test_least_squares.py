"""The numerics of refit against float64 references: products, ridge regression, and the greedy selection."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.fusion.refit.least_squares import FLOOR, change_of_rows, squared
from fedloom.fusion.refit.selection import ALIKE, TINY, choose, pooled

PENALTY = 0.1
seeds = st.integers(0, 2**31)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 3), st.integers(1, 300), st.integers(1, 9), seeds)
@settings(max_examples=25, deadline=None)
def test_a_product_by_bands_is_the_product(groups, rows, columns, seed):
    x = drawn(seed, groups, rows, columns)
    torch.testing.assert_close(squared(x), x @ x.mT)
    torch.testing.assert_close(squared(x.mT), x.mT @ x)


@given(st.integers(3, 400), st.integers(1, 200), st.integers(1, 5), seeds)
@settings(max_examples=25, deadline=None)
def test_a_change_in_float32_is_that_of_a_reference_in_float64(rows, inputs, outputs, seed):
    scales = drawn(seed + 1, inputs).exp()
    x, errors = (drawn(seed, rows, inputs) + 1.0) * scales, drawn(seed + 2, rows, outputs)
    centred = x - x.mean(dim=0)
    spread = centred.square().sum(dim=0)
    ridge = (PENALTY * (spread + FLOOR * spread.mean())).sqrt().diag()
    wanted = torch.linalg.lstsq(
        torch.cat([centred, ridge]), torch.cat([errors - errors.mean(dim=0), 0.0 * ridge[:, :1].expand(-1, outputs)])
    ).solution
    weight, bias = change_of_rows(x.float()[None], errors.float()[None], PENALTY)
    size = float((centred @ wanted).norm()) + 1e-3 * float(errors.norm())
    assert float((centred @ (weight[0].T - wanted)).norm()) <= 1e-3 * size
    torch.testing.assert_close(bias[0], errors.mean(dim=0) - x.mean(dim=0) @ weight[0].T, rtol=1e-3, atol=1e-3)


@given(st.integers(2, 60), st.integers(2, 90), st.floats(0.1, 0.9), seeds)
@settings(max_examples=25, deadline=None)
def test_the_greedy_choice_explains_what_the_residual_in_float64_says(channels, rows, share, seed):
    count = max(1, int(share * channels))
    values = (drawn(seed, channels, rows) * drawn(seed + 1, channels, 1).exp()).float()
    weight = torch.ones(channels, dtype=torch.float64)
    pool = pooled([(values, weight, values)], [channels], torch.arange(channels)[:, None])
    rest, order = pool.weighted.clone(), list[int]()
    floor = ALIKE**2 * rest.diagonal() + TINY
    for _ in range(count):
        gains = rest.square().sum(dim=0) / rest.diagonal().clamp(min=0.0).add(floor)
        gains[order] = -1.0
        order.append(best := int(gains.argmax()))
        rest = rest - rest[:, best, None] * rest[best] / (rest[best, best].clamp(min=0.0) + floor[best])
    lost = [unexplained(pool.weighted, chosen) for chosen in (choose(pool, count).chosen, torch.tensor(order))]
    assert lost[0] <= lost[1] + 1e-4


def unexplained(covariance: Tensor, chosen: Tensor) -> float:
    """Return the share of the variance that linear regression on the chosen channels leaves."""
    own = covariance[chosen][:, chosen] + 1e-9 * covariance.diagonal().mean() * torch.eye(len(chosen), dtype=torch.float64)
    explained = (torch.linalg.solve(own, covariance[chosen]) * covariance[chosen]).sum()
    return 1.0 - float(explained / covariance.trace())
