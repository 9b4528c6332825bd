"""Plans: marginals, permutations, normalisations; a network that was permuted is found again."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import ot
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.moves import apply
from fedloom.fusion.cla_ot.transport import TransportSettings, correlation_cost, neutral_plan, solve, squared_cost
from fedloom.fusion.graph.channels import wire
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from tests.fusion.parts import PLAIN, apart, hidden, images, network

widths = st.tuples(st.integers(1, 9), st.integers(1, 9))
seeds = st.integers(0, 2**31)


def costs(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


def weights(shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    own, other = (torch.rand(width, generator=generator).double() + 0.1 for width in shape)
    return own, other


SINKHORN = {"solver": "sinkhorn", "regularisation": 0.1}
solvers = st.sampled_from([{}, SINKHORN])


@given(
    widths, seeds, solvers, st.sampled_from(["uniform", "importance"]), st.sampled_from(["none", "max", "mean", "median"])
)
@settings(max_examples=60, deadline=None)
@example((2, 2), 2, SINKHORN, "uniform", "median")  # these converge slowly
@example((2, 2), 2, SINKHORN, "importance", "median")
@example((2, 2), 2137857713, SINKHORN, "uniform", "mean")
@example((4, 8), 143057792, SINKHORN, "uniform", "mean")
def test_plans_have_their_marginals(shape, seed, solver, marginals, scale):
    given_weights = weights(shape, seed)
    plan = solve(costs(shape, seed), TransportSettings(marginals=marginals, scale=scale, **solver), importance=given_weights)
    wanted = [torch.full((width,), 1 / width).double() for width in shape]
    if marginals == "importance":
        wanted = [weight / weight.sum() for weight in given_weights]
    assert plan.joint.dtype == torch.float64 and plan.joint.min() >= 0
    torch.testing.assert_close(plan.joint.sum(dim=1), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plan.joint.sum(dim=0), wanted[1], atol=1e-5, rtol=1e-5)


@given(st.integers(1, 6), seeds)
@settings(max_examples=40, deadline=None)
def test_equal_widths_give_the_best_permutation(width, seed):
    cost = costs((width, width), seed)
    plan = solve(cost, TransportSettings())
    best = min(cost[np.arange(width), order].sum() for order in map(list, itertools.permutations(range(width))))
    ones = plan.outgoing
    assert set(ones.unique().tolist()) <= {0.0, 1.0}
    assert ones.sum(dim=0).eq(1).all() and ones.sum(dim=1).eq(1).all()
    assert torch.equal(ones, plan.incoming)
    assert plan.cost == pytest.approx(best / width)


@given(widths, seeds)
@settings(max_examples=40, deadline=None)
def test_normalisations(shape, seed):
    cost = costs(shape, seed)
    both = solve(cost, TransportSettings())
    columns = solve(cost, TransportSettings(normalisation="columns"))
    torch.testing.assert_close(both.outgoing.sum(dim=0), torch.ones(shape[1]).double())
    torch.testing.assert_close(both.incoming.sum(dim=1), torch.ones(shape[0]).double())
    for matrix in (columns.outgoing, columns.incoming):
        torch.testing.assert_close(matrix.sum(dim=0), torch.ones(shape[1]).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(columns.incoming.sum(), torch.tensor(float(shape[1])).double(), atol=1e-4, rtol=0)


@given(widths, seeds)
@settings(max_examples=25, deadline=None)
def test_sinkhorn_is_near_exact_for_little_regularisation(shape, seed):
    cost = costs(shape, seed)
    exact = solve(cost, TransportSettings()).cost
    near = solve(cost, TransportSettings(solver="sinkhorn", regularisation=0.005)).cost
    assert exact - 2e-3 <= near <= exact + 0.005 * np.log(shape[0] * shape[1]) + 2e-3


def test_plans_that_converged_are_sinkhorns_own():
    for seed in range(20):
        shape, cost = (7, 5), costs((7, 5), seed)
        mu, nu = np.full(shape[0], 1 / shape[0]), np.full(shape[1], 1 / shape[1])
        own = ot.sinkhorn(mu, nu, cost, 0.1, method="sinkhorn_log", numItermax=100_000, stopThr=1e-13)
        np.testing.assert_allclose(solve(cost, TransportSettings(**SINKHORN)).joint, np.asarray(own), atol=1e-8)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_plan_that_is_far_from_converged_is_refused(groups):
    chosen = TransportSettings(solver="sinkhorn", regularisation=1e-6)
    with pytest.raises(
        UserError, match=r"sinkhorn .*regularisation 1e-06 .*not converged.*larger regularisation, or exact plans"
    ):
        solve(costs((20, 20)), chosen, groups=groups)


def test_the_layer_whose_plan_cannot_be_made_is_named():
    chosen = replace(PLAIN, transport=TransportSettings(solver="sinkhorn", regularisation=1e-6))
    networks = [network("mlp:widths=[30,20]", seed) for seed in (0, 1)]
    for given_settings in (chosen, replace(chosen, sequential=True)):
        with pytest.raises(UserError, match=r"layer 'extractor\.1': .*sinkhorn"):
            fuse(networks, into=1, probe=images(40), settings=given_settings)


@given(widths, st.integers(2, 20), seeds)
@settings(max_examples=40, deadline=None)
def test_ground_costs(shape, samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(width, samples, generator=generator).double() for width in shape)
    direct = (x[:, None] - y[None]).square().sum(dim=2)
    np.testing.assert_allclose(squared_cost([(x, y)]), direct, atol=1e-9)
    np.testing.assert_allclose(squared_cost([(x, y), (2 * x, 2 * y)]), 5 * direct, atol=1e-9)
    expected = 1 - np.corrcoef(torch.cat([x, y]))[: shape[0], shape[0] :]
    np.testing.assert_allclose(correlation_cost([(x, y)]), expected, atol=1e-9)
    np.testing.assert_allclose(correlation_cost([(x, y), (-x, y)]), np.ones(shape), atol=1e-9)
    np.testing.assert_allclose(correlation_cost([(3 * x + 1, y)]), expected, atol=1e-9)


def test_a_constant_channel_is_like_no_other():
    assert correlation_cost([(torch.ones(2, 5), torch.randn(3, 5))]).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(("scale", "divisor"), [("none", 1.0), ("max", 9.0), ("mean", 4.0), ("median", 3.0)])
def test_scales(scale, divisor):
    cost = np.array([[1.0, 9.0], [2.0, 4.0]])
    assert solve(cost, TransportSettings(scale=scale)).cost == pytest.approx(2.5 / divisor)
    assert solve(np.zeros((2, 2)), TransportSettings(scale=scale)).cost == 0.0


@given(st.sampled_from([(4, 8, 8), (2, 6, 4), (3, 3, 9), (2, 8, 8)]), seeds, solvers, st.booleans())
@settings(max_examples=40, deadline=None)
def test_groups_stay_whole(sizes, seed, solver, important):
    groups, n, m = sizes
    chosen = TransportSettings(marginals="importance" if important else "uniform", **solver)
    plan = solve(costs((n, m), seed), chosen, groups=groups, importance=weights((n, m), seed))
    blocks = plan.joint.reshape(groups, n // groups, groups, m // groups).sum(dim=(1, 3))
    assert torch.equal(blocks > 1e-9, blocks > 1 / groups - 1e-6)
    torch.testing.assert_close(blocks.sum(dim=0), torch.full((groups,), 1 / groups).double())
    torch.testing.assert_close(plan.joint.sum(), torch.ones(()).double())


def test_groups_go_where_they_fit():
    cost = np.ones((4, 4))
    cost[0, 3] = cost[1, 2] = cost[2, 1] = cost[3, 0] = 0.0
    assert solve(cost, TransportSettings(), groups=2).outgoing.argmax(dim=0).tolist() == [3, 2, 1, 0]
    cost = 1.0 - np.eye(4)[[0, 2, 1, 3]]
    assert solve(cost, TransportSettings()).outgoing.argmax(dim=0).tolist() == [0, 2, 1, 3]
    assert solve(cost, TransportSettings(), groups=2).cost == pytest.approx(0.5)


def test_neutral_plans():
    assert torch.equal(neutral_plan(3, 3).outgoing, torch.eye(3).double())
    plan = neutral_plan(2, 4)
    torch.testing.assert_close(plan.outgoing, torch.full((2, 4), 0.5).double())
    torch.testing.assert_close(plan.incoming, torch.full((2, 4), 0.25).double())


def test_costs_that_are_not_finite():
    with pytest.raises(UserError, match="transport: costs between channels are not finite"):
        solve(np.array([[0.0, np.nan]]), TransportSettings())


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), seeds)
@settings(max_examples=30, deadline=None)
def test_apply_moves_channels_with_their_entries(n, m, repeat, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor, matrix = (torch.randn(*shape, generator=generator).double() for shape in ((3, n * repeat), (n, m)))
    moved = apply(tensor, matrix, 1)
    direct = torch.einsum("anr,nm->amr", tensor.reshape(3, n, repeat), matrix).reshape(3, m * repeat)
    torch.testing.assert_close(moved, direct)


def test_a_tensor_that_no_plan_fits_is_named():
    with pytest.raises(UserError, match=r"tensor 'head\.weight': dimension 1 has 7 entries, the plan 3 channels"):
        apply(torch.zeros(2, 7), torch.zeros(3, 3), 1, "head.weight")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"ground": "cosine"}, "transport ground: got 'cosine', takes one of: correlation, squared, euclidean"),
        ({"scale": "sum"}, "transport scale: got 'sum'"),
        ({"solver": "simplex"}, "transport solver: got 'simplex'"),
        ({"marginals": "norm"}, "transport marginals: got 'norm'"),
        ({"normalisation": "rows"}, "transport normalisation: got 'rows'"),
        ({"regularisation": 0.0}, "transport regularisation: got 0.0, takes a number above 0"),
        ({"regularisation": float("nan")}, "transport regularisation: got nan"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], line):
    with pytest.raises(UserError, match=line):
        TransportSettings(**options)


NETWORKS = [
    "mlp:widths=[12,9,7]",
    "lenet",
    "vgg11:width=0.125,norm=none,bias=true",
    "vgg13:width=0.125,norm=batch",
    "vgg11:width=0.125,norm=group,groups=4",
    "vgg11:width=0.125,norm=group,groups=1,standardise=true",
    "resnet18:width=0.125,norm=none",
    "resnet20:norm=batch",
    "resnet20:norm=group,groups=4",
    "wide_resnet:depth=10,widen=1,norm=batch",
]
GROUNDS = [TransportSettings(ground=ground) for ground in ("correlation", "euclidean", "squared")]


@pytest.mark.parametrize("text", NETWORKS)
@pytest.mark.parametrize("basis", ["activations", "weights"])
def test_a_hidden_permutation_is_found(text, basis):
    original, probe = network(text), images(16)
    moved = hidden(original, probe)
    assert not torch.allclose(next(moved.parameters()), next(original.parameters()))
    fused = fuse([moved, original], into=1, probe=probe, settings=replace(PLAIN, basis=basis))
    for name, tensor in original.state_dict().items():
        torch.testing.assert_close(fused.aligned[0].state_dict()[name], tensor)
    test = images(6, seed=1)
    assert apart(fused.aligned[0], original, test) < 1e-6
    assert apart(fused.network, original, test) < 1e-6


@pytest.mark.parametrize("transport", [*GROUNDS, TransportSettings(marginals="importance", ground="squared", scale="max")])
@pytest.mark.parametrize("text", ["mlp:widths=[12,9,7]", "resnet20:norm=batch"])
def test_a_hidden_permutation_is_found_with_every_ground(text, transport):
    original, probe = network(text), images(16)
    fused = fuse([hidden(original, probe), original], into=1, probe=probe, settings=replace(PLAIN, transport=transport))
    assert apart(fused.aligned[0], original, images(6, seed=1)) < 1e-5


@pytest.mark.parametrize("text", ["mlp:widths=[12,9,7]", "vgg11:width=0.125,norm=none,bias=true"])
def test_a_hidden_permutation_is_found_as_the_public_code_does(text):
    original, probe = network(text), images(16)
    moved = hidden(original, probe)
    fused = fuse([moved, original], into=1, probe=probe, settings=FusionSettings.reference())
    assert apart(fused.network, original, images(6, seed=1)) < 1e-3  # 1e-7 is added to its column sums


@pytest.mark.parametrize("family", ["vgg11:norm=none,bias=true", "vgg11:norm=batch", "resnet18:norm=batch", "lenet"])
@pytest.mark.parametrize("basis", ["weights", "activations"])
def test_unequal_widths(family, basis):
    narrow, wide = (network(family + ("," if ":" in family else ":") + f"width={w}", k) for k, w in enumerate((0.125, 0.25)))
    fused = fuse([wide, narrow], into=1, probe=images(8), settings=replace(PLAIN, basis=basis))
    shapes = {name: tensor.shape for name, tensor in narrow.state_dict().items()}
    assert {name: tensor.shape for name, tensor in fused.network.state_dict().items()} == shapes
    for plan in fused.plans[0].values():
        torch.testing.assert_close(plan.sum(dim=0), torch.ones(plan.shape[1]).double())


def test_group_norm_plans_of_a_network_keep_groups():
    texts = ("vgg11:width=0.125,norm=group,groups=4", "vgg11:width=0.25,norm=group,groups=4")
    one, other = (network(text, seed) for seed, text in enumerate(texts))
    fused = fuse([other, one], into=1, probe=images(8), settings=replace(PLAIN, repair=True))
    assert all(axis.groups == 4 for axis in wire(one, images(1)).axes if axis.slots and not axis.fixed)
    for plan in fused.plans[0].values():
        n, m = plan.shape
        blocks = plan.reshape(4, n // 4, 4, m // 4).abs().sum(dim=(1, 3)) > 0
        assert blocks.sum(dim=0).eq(1).all() and blocks.sum(dim=1).eq(1).all()
