"""How often a fused network gives the joint answer of its parents, and what `fuse` says if a parent does so more often."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.fusion import FusionSettings, fuse
from fedloom.fusion.agreement import Agreement, agreement


def network(seed: int, width: int) -> nn.Module:
    """A random network that is sure of its answers."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    net = nn.Sequential(*body, nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, 10)).eval()
    with torch.no_grad():
        net[-1].weight.mul_(20.0)  # type: ignore[operator]
    return net


@pytest.mark.parametrize(("seed", "widths", "worse"), [(0, (8, 8), False), (1, (24, 3), True)])
def test_fuse_says_if_a_parent_gives_the_joint_answer_more_often(seed: int, widths: tuple[int, int], worse: bool):
    torch.manual_seed(seed)
    networks = [network(seed, widths[0]), network(seed + 10, widths[1])]
    probe = torch.randn(400, 1, 8, 8)
    fused = fuse(networks, into=1, probe=probe)
    with torch.no_grad():
        answers = [net(probe) for net in (*networks, fused.network)]
    assert fused.agreement == agreement(answers[:2], answers[2], [0.5, 0.5])
    assert fused.agreement is not None and (fused.agreement.fused < max(fused.agreement.parents)) == worse
    assert any("compare both before you use it" in note for note in fused.notes) == worse


def test_what_answers_no_classes_is_not_compared():
    networks, probe = [network(0, 4), network(1, 4)], torch.randn(20, 1, 8, 8)
    assert fuse(networks, into=0, probe=probe, settings=FusionSettings(answers="values")).agreement is None


def test_a_network_that_is_not_refitted_is_compared_too():
    networks, probe = [network(0, 8), network(1, 8)], torch.randn(200, 1, 8, 8)
    fused = fuse([net.train() for net in networks], into=0, probe=probe, settings=FusionSettings(refit="none"))
    with torch.no_grad():
        answers = [net.eval()(probe) for net in (*networks, fused.network)]
    assert fused.agreement == agreement(answers[:2], answers[2], [0.5, 0.5])
    assert fused.agreement is not None and fused.agreement.fused < max(fused.agreement.parents)
    assert any("compare both before you use it" in note for note in fused.notes)


@pytest.mark.parametrize(("copies", "few"), [(2, True), (7, True), (8, False)])
def test_few_different_samples_are_named(copies: int, few: bool):
    torch.manual_seed(0)
    probe = torch.randn(copies, 1, 8, 8).repeat(3, 1, 1, 1)
    notes = fuse([network(0, 4), network(1, 4)], into=0, probe=probe).notes
    assert any(f"only {copies} different samples" in note for note in notes) == few


def test_a_parent_that_is_better_is_named_with_both_shares():
    assert Agreement((0.5, 0.9), 0.9).notes() == []
    (note,) = Agreement((0.5, 0.9), 0.899).notes()
    assert "89.9% of the samples, network 1 alone for 90.0%" in note


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 3))
def test_the_joint_answer_of_one_network_is_its_own(seed: int, count: int, alone: int):
    draw = torch.Generator().manual_seed(seed)
    answers: list[Tensor] = [torch.randn(7, 5, generator=draw) for _ in range(count)]
    alone %= count
    weights = [float(index == alone) for index in range(count)]
    agreed = agreement(answers, answers[0], weights)
    assert agreed.parents[alone] == 1.0 and agreed.fused == agreed.parents[0]
