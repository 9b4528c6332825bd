"""Distillation: the student comes nearer to the teachers, stays where it is right already, and bad settings are refused."""

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import FusionSettings, fuse
from fedloom.conf.errors import UserError
from fedloom.fusion.distillation import Distillation, distil, distillation_loss, imitate


def network(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()


def drawn() -> Tensor:
    return torch.randn(65, 6, generator=torch.Generator().manual_seed(0))


def apart(student: nn.Module, teacher: nn.Module) -> float:
    """KL(teacher || student)."""
    with torch.no_grad():
        goal, given = teacher(drawn()).log_softmax(1), student(drawn()).log_softmax(1)
    return float((goal.exp() * (goal - given)).sum(1).mean())


def taught(settings: Distillation, seed: int = 0) -> tuple[float, float, nn.Module]:
    student, teacher = network(1), network(2)
    before = apart(student, teacher)
    with torch.no_grad():
        answers = teacher(drawn())
    distil(student, drawn(), answers, settings, torch.Generator().manual_seed(seed))
    return before, apart(student, teacher), student


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_student_comes_nearer_and_is_in_the_mode_in_which_it_was(temperature):
    before, after, student = taught(Distillation(steps=150, rate=0.01, batch=16, temperature=temperature))
    assert after < 0.3 * before and not student.training


def test_the_same_seed_gives_the_same_bits():
    settings = Distillation(steps=7, batch=16)
    one, other, third = (taught(settings, seed)[2].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one) and not torch.equal(one["0.weight"], third["0.weight"])


def test_who_is_right_stays_right():
    plain = nn.Sequential(*[layer for layer in network(1) if not isinstance(layer, nn.BatchNorm1d)])
    twin = copy.deepcopy(plain)
    with torch.no_grad():
        answers = plain(drawn())
    distil(twin, drawn(), answers, Distillation(steps=20, rate=1e-4), torch.Generator())
    assert apart(twin, plain) < 1e-5


@pytest.mark.parametrize("options", [{"steps": 0}, {"batch": 0}, {"rate": 0.0}, {"temperature": float("inf")}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(UserError, match=f"distillation {next(iter(options))}: got"):
        Distillation(**options)


def test_other_numbers_of_inputs_and_answers_are_refused():
    with pytest.raises(UserError, match="65 inputs and 64 answers"):
        distil(network(0), drawn(), torch.zeros(64, 4), Distillation(), torch.Generator())


def test_the_loss_goes_from_plain_training_to_the_teacher():
    logits, answers = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(3))
    labels = torch.arange(9) % 4
    plain = F.cross_entropy(logits, labels)
    for heat in (1.0, 8.0):
        assert torch.equal(distillation_loss(logits, answers, heat, labels, 0.0), plain)
        soft = distillation_loss(logits, answers, heat)
        assert torch.equal(distillation_loss(logits, answers, heat, labels, 1.0), soft)
        assert torch.allclose(distillation_loss(logits, answers, heat, labels, 0.25), 0.25 * soft + 0.75 * plain)
    assert distillation_loss(answers, answers, 4.0).abs() < 1e-6
    for weight, given in ((1.5, labels), (0.5, None)):
        with pytest.raises(UserError, match=f"distillation weight: got {weight}"):
            distillation_loss(logits, answers, 1.0, given, weight)


def test_each_step_of_a_sequence_counts_as_an_example():
    logits, answers = torch.randn(2, 5, 7, 4, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(35).view(5, 7) % 4
    flat = distillation_loss(logits.view(35, 4), answers.view(35, 4), 2.0, labels.view(35), 0.5)
    assert torch.equal(distillation_loss(logits, answers, 2.0, labels, 0.5), flat)


def convolutional(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first, norm = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        return nn.Sequential(first, norm, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(96, 4)).eval()


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 1, 9, 16, generator=torch.Generator().manual_seed(seed))


def joint(networks: Sequence[nn.Module], weights: list[float], inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return sum((share * each(inputs).softmax(1) for share, each in zip(weights, networks, strict=True)), torch.zeros(()))


def off(student: nn.Module, goal: Tensor, inputs: Tensor) -> float:
    with torch.no_grad():
        return float(F.kl_div(student(inputs).log_softmax(1), goal, reduction="batchmean"))


def test_an_imitation_comes_nearer_on_inputs_that_it_never_saw_and_changes_no_teacher():
    student, teachers, weights = convolutional(1), [convolutional(2), convolutional(3)], [0.25, 0.75]
    for parameter in student.parameters():
        parameter.requires_grad_(False)
    kept = [copy.deepcopy(teacher.state_dict()) for teacher in teachers]
    unseen = pictures(100, seed=1)
    goal = joint(teachers, weights, unseen)
    before = off(student, goal, unseen)
    imitate(student, teachers, weights, pictures(64), Distillation(steps=150, rate=0.01, batch=32))
    assert off(student, goal, unseen) < 0.5 * before
    assert not student.training and not any(parameter.requires_grad for parameter in student.parameters())
    for teacher, state in zip(teachers, kept, strict=True):
        assert not teacher.training and all(
            torch.equal(state[name], tensor) for name, tensor in teacher.state_dict().items()
        )


def test_a_distilled_fusion_is_nearer_to_the_joint_answer_and_the_same_in_each_call():
    networks, probe = [convolutional(2), convolutional(3)], pictures(64)
    settings = FusionSettings(refit="none", distillation=100)
    plain = fuse(networks, into=0, probe=probe, settings=FusionSettings(refit="none")).network
    torch.manual_seed(1)
    made = fuse(networks, into=0, probe=probe, settings=settings)
    torch.manual_seed(2)
    again = fuse(networks, into=0, probe=probe, settings=settings).network.state_dict()
    goal = joint(networks, [0.5, 0.5], probe)
    assert off(made.network, goal, probe) < off(plain, goal, probe) and "distil" in made.seconds
    assert made.agreement is not None and all(
        torch.equal(again[name], each) for name, each in made.network.state_dict().items()
    )


def standing(network: nn.Module) -> tuple[list[bool], list[tuple[bool, Tensor | None]]]:
    """The training mode of each module, and what each parameter has of gradients."""
    modes = [module.training for module in network.modules()]
    return modes, [(parameter.requires_grad, parameter.grad) for parameter in network.parameters()]


@pytest.mark.parametrize("settings", [FusionSettings(distillation=2), FusionSettings(refit="none", distillation=2),
                                      FusionSettings(distillation=2, distil_from="into"), FusionSettings()])  # fmt: skip
@pytest.mark.parametrize("weights", [None, [1.0, 0.0]])
def test_no_network_has_other_gradients_modes_or_weights_after_a_fusion(settings, weights):
    networks = [convolutional(2), convolutional(3)]
    for each in networks:
        each.train()[1].eval()  # a frozen BatchNorm
        first = each.get_parameter("0.weight")
        first.grad = torch.ones_like(first)
        each[5].weight.requires_grad_(False)
    before = [standing(each) for each in networks]
    states = [copy.deepcopy(each.state_dict()) for each in networks]
    made = fuse(networks, into=0, probe=pictures(32), weights=weights, settings=settings).network
    for each, was, state in zip(networks, before, states, strict=True):
        modes, gradients = standing(each)
        assert modes == was[0]
        assert all(new[0] == old[0] and new[1] is old[1] for new, old in zip(gradients, was[1], strict=True))
        assert all(torch.equal(state[name], tensor) for name, tensor in each.state_dict().items())
    modes, gradients = standing(made)
    assert not any(modes) and all(gradient is None for _, gradient in gradients)
    assert [needed for needed, _ in gradients] == [needed for needed, _ in before[0][1]]


def test_a_student_has_its_own_modes_and_gradients_after_a_distillation():
    student, seen = convolutional(1).train(), pictures(16)
    student[1].eval()
    first = student.get_parameter("0.weight")
    first.grad = torch.ones_like(first)
    before = standing(student)
    distil(student, seen, torch.zeros(16, 4), Distillation(steps=2), torch.Generator())
    modes, gradients = standing(student)
    assert modes == before[0] and all(new[1] is old[1] for new, old in zip(gradients, before[1], strict=True))
    with pytest.raises(RuntimeError):
        imitate(student, [nn.Flatten()], [1.0], seen, Distillation(steps=2))
    assert standing(student)[0] == before[0] and student[0].weight.grad is not None


def test_a_distillation_from_into_starts_at_that_network():
    networks, probe = [convolutional(2), convolutional(3)], pictures(64)
    start = convolutional(2)
    imitate(start, networks, [0.5, 0.5], probe, Distillation(20, rate=5e-4))
    made = fuse(networks, into=0, probe=probe, settings=FusionSettings(distillation=20, distil_from="into"))
    expected = start.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in made.network.state_dict().items())
    assert made.pairs[1] and not any(made.plans) and "distil" in made.seconds


def test_a_distillation_from_into_has_the_depth_of_another_network():
    deep = nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64), nn.ReLU()) * 2, nn.Linear(64, 4)).eval()
    shallow = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 4)).eval()
    probe = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    deep[3] = nn.Linear(64, 64)
    settings = FusionSettings(distillation=5, distil_from="into")
    made = fuse([shallow, deep], into=0, depth=1, probe=probe, settings=settings).network
    assert [tuple(tensor.shape) for tensor in made.parameters()][::2] == [(9, 64), (9, 9), (4, 9)]
    goal = joint([shallow, deep], [0.5, 0.5], probe)
    assert off(made, goal, probe) < off(shallow, goal, probe)


def test_dropout_draws_the_same_in_each_call_and_leaves_the_callers_generator():
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before, student = torch.get_rng_state(), nn.Sequential(nn.Dropout(0.5), *convolutional(1))
        imitate(student, [convolutional(2)], [1.0], pictures(16), Distillation(steps=3))
        made.append(student.state_dict())
        assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_only_classifiers_of_images_are_distilled():
    with pytest.raises(UserError, match=r"distillation: got inputs \[65, 6\], takes at least two images"):
        fuse([network(1), network(2)], into=0, probe=drawn(), settings=FusionSettings(distillation=5))
    with pytest.raises(UserError, match="fusion distillation: got -1"):
        FusionSettings(distillation=-1)
    with pytest.raises(UserError, match="fusion distillation: needs logits of classes"):
        FusionSettings(distillation=5, answers="values")
    for options in ({}, {"distillation": 5, "width": 1.5}):
        with pytest.raises(UserError, match="fusion distil_from: got 'into' with distillation"):
            FusionSettings(distil_from="into", **options)
    with pytest.raises(UserError, match="fusion refit: got 'plans', has no effect with distil_from 'into'; leave one out"):
        FusionSettings(distillation=5, distil_from="into", refit="plans")
    with pytest.raises(UserError, match="fusion distil_from: got 'b', takes one of: fused, into"):
        FusionSettings(distillation=5, distil_from="b")
