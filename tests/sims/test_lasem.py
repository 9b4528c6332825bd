"""Layer selection on sequences of tasks: what learners keep, and the paper's tables."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.clients.data import Examples
from fedloom.clients.objectives.layer_selection.configurations import every
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.sims.experiments import lasem
from fedloom.sims.experiments.lasem import runs, tables
from fedloom.sims.experiments.lasem import tasks as sequences
from fedloom.sims.experiments.lasem.comparators import Apd, Darts, Made, Progressive
from fedloom.sims.experiments.lasem.lifelong import Learner, Outcome, Plan, accuracy, met
from fedloom.sims.experiments.lasem.runs import COMPARED, SIZES, TaskSequence, of
from fedloom.sims.experiments.lasem.selecting import Selecting, configured
from fedloom.sims.experiments.lasem.tasks import Task
from fedloom.sims.experiments.study import Study
from fedloom.sims.report.tables import Table
from tests.server.arithmetics import one_core

NETWORK = {"name": "convnet", "widths": [3, 4, 4, 3], "pools": [2], "hidden": [5], "norm": "none", "bias": True}
PLAN = Plan(2, 0.05, every=1)
TINY = TaskSequence("made-up tasks", "made up", 1, 8, NETWORK, PLAN, "CIFAR-100")


def made_up(size: int, number: int, seed: int) -> list[Task]:
    """Tasks of three classes of noisy images, each class as bright as its number."""

    def images(count: int, place: int) -> Examples:
        labels = torch.arange(count) % 3
        noise = torch.randint(0, 60, (count, 3, size, size), generator=torch_generator(seed, str(place), str(count)))
        return Examples((noise + 60 * labels[:, None, None, None]).to(torch.uint8), labels)

    return [Task(f"task {place}", images(30, place), images(9, place), images(15, place), 3) for place in range(number)]


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setitem(SIZES, "tiny", {"made": TINY, "resnet": TINY})
    monkeypatch.setitem(runs.SEQUENCES, "made up", made_up)
    return Study("tiny", tmp_path)


def config() -> Config:
    return configured(NETWORK, 8, 3, 3, 0)


def states(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


class Watched:
    """A learner whose first task's network is compared before and after a second task."""

    def __init__(self, learner: Learner) -> None:
        tasks = made_up(8, 2, 0)
        self.first = met(learner, tasks[:1], PLAN, 0)
        images = torch.randn(4, 3, 8, 8, generator=torch_generator(0, "images"))
        before = learner.network(0).eval()(images).detach()
        training = learner.start(1, tasks[1].validation)
        training.loss(torch.randn(10, 3, 8, 8), torch.arange(10) % 3).backward()
        with torch.no_grad():
            for one in training.parameters():
                one -= 0.1 * one.grad if one.grad is not None else 0.0
        learner.finish(1, training)
        self.moved = float((learner.network(0).eval()(images).detach() - before).abs().max())


def test_progressive_networks_forget_nothing_and_shared_layers_move():
    assert Watched(Progressive(config())).moved == 0.0
    assert Watched(Selecting({"mode": "none"}, config())).moved == 0.0
    for learner in (Selecting({"mode": "all"}, config()), Darts(config(), "hps"), Darts(config(), "df_cnn")):
        assert Watched(learner).moved > 0.0


def test_a_second_column_reads_the_first_one():
    learner = Progressive(config())
    met(learner, made_up(8, 2, 0), PLAN, 0)
    images = torch.randn(4, 3, 8, 8)
    second = learner.network(1).eval()
    before = second(images).detach()
    with torch.no_grad():
        for one in learner.network(0).parameters():
            one += 0.5
    assert not torch.equal(second(images).detach(), before)


def test_soft_selections_move_on_validation_images_alone():
    learner = Darts(config(), "hps")
    task = made_up(8, 1, 0)[0]
    training = learner.start(0, task.validation)
    made = training.network()
    assert isinstance(made, Made)
    alphas = {name: one for name, one in made.own.items() if "alpha" in name}
    moving = {id(one) for one in training.parameters()}
    assert len(alphas) == 4 and not any(id(one) in moving for one in alphas.values())
    training.loss(torch.randn(6, 3, 8, 8), torch.arange(6) % 3)
    assert any(bool(one.detach().any()) for one in alphas.values())


def test_additive_decomposition_holds_earlier_weights():
    moved = {hold: Watched(Apd(config(), hold=hold)).moved for hold in (0.0, 1e-3)}
    assert moved[0.0] > 0.0 and moved[1e-3] > 0.0
    learner = Apd(config())
    met(learner, made_up(8, 1, 0), PLAN, 0)
    training = learner.start(1, made_up(8, 2, 0)[1].validation)
    with torch.no_grad():
        for one in learner.shared.values():
            one += 1.0
    held = training.loss(torch.zeros(3, 3, 8, 8), torch.arange(3))
    assert float(held.detach()) > 100.0  # the first task's weights are far from where they were


def test_layers_that_a_task_does_not_choose_go_back():
    learner = Selecting({"mode": "top-2"}, config())
    before = {name: one.clone() for name, one in learner.shared.items()}
    met(learner, made_up(8, 1, 0), PLAN, 0)
    for name, one in learner.shared.items():
        assert torch.equal(one, before[name]) == (learner.layers.group_of(name) < 2)


def test_accuracies_are_those_of_the_networks_that_are_named():
    learner, tasks = Selecting({"mode": "all"}, config()), made_up(8, 3, 0)
    found = met(learner, tasks, PLAN, 0)
    assert found.final == [accuracy(learner.network(place), task.test) for place, task in enumerate(tasks)]
    assert found.kept == pytest.approx(sum(f / p for f, p in zip(found.final, found.peak, strict=True)) / 3)
    again = met(Selecting({"mode": "all"}, config()), made_up(8, 3, 0), PLAN, 0)
    assert again.peak == found.peak and again.final == found.final and found.seconds > 0


def test_every_table_has_its_rows_and_is_made_once(study: Study, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "GROUPS", {4: [1, 1, 1, 1]})
    monkeypatch.setattr(tables, "LEARNERS", {"DF-CNN": "df_cnn"})
    rows = {"figure1": 9, "figure4": 1, "figure5": 1, "figure6": 7, "searches": 3, "table1": 5, "table2": 2, "table3": 1}
    for name, count in rows.items():
        [first, *_] = [part for part in tables.TABLES[name](study) if isinstance(part, Table)]
        assert len(first.rows) == count, name
    monkeypatch.setattr(runs, "met", lambda *given: pytest.fail("it was there already"))
    assert len(tables.figure1(study)) == 1
    assert (study.folder / "figure4-made.png").is_file() and set(rows) | {"federated"} == set(tables.TABLES)


@pytest.mark.nightly
def test_brute_force_takes_each_tasks_best_configuration_by_validation_images():
    runs = [Outcome([0.5, 0.1], [0.2, 0.9]), Outcome([0.4, 0.3], [1.0, 0.6])]
    assert tables._best(runs) == pytest.approx((0.2 + 0.6) / 2)
    assert len(every(4)) == 16 and set(COMPARED) == {"ProgNN", "APD-Net", "DARTS HPS", "DARTS DF-CNN"}
    assert of("TF", "all") == {"mode": "all", "learner": {"name": "tf"}}


def test_tasks_have_as_many_images_as_the_papers(monkeypatch: pytest.MonkeyPatch):
    labels = torch.arange(100).repeat(30)
    whole = Examples(torch.arange(3000)[:, None, None, None].expand(-1, 3, 8, 8) % 255, labels)
    monkeypatch.setattr(sequences, "images", lambda domain, part: whole)
    found = sequences.cifar100(8, 12, 0)
    assert [len(part) for part in (found[0].train, found[0].validation)] == [170, 30]
    assert found[0].train.y.unique().tolist() == list(range(10))
    digits = Examples(whole.x.to(torch.uint8).repeat(3, 1, 1, 1), torch.arange(10).repeat(900))
    monkeypatch.setattr(sequences, "images", lambda domain, part: digits)
    drawn = sequences.digits(8, 3, 0)
    assert [len(part) for part in (drawn[0].train, drawn[0].validation)] == [318, 57] and drawn[0].classes == 3
    assert torch.equal(sequences.digits(8, 3, 0)[1].train.x, drawn[1].train.x)
    assert not torch.equal(sequences.digits(8, 3, 1)[1].train.x, drawn[1].train.x)


def test_wrong_words_are_reported_in_a_line():
    for words, message in [
        (["tables=figure9"], "table.*figure"),
        (["sequences=office"], "unknown sequence 'office'"),
        (["rat=1"], "rate"),
        (["epochs=many"], "epochs: got 'many', takes a whole number"),
        (["epochs=0"], "epochs: got 0, takes a whole number above 0"),
        (["rate=nan"], "rate: got nan, takes a number above 0"),
    ]:
        with pytest.raises(UserError, match=message):
            lasem.reproduce("cpu", 1, words, quiet=True)
    with pytest.raises(UserError, match="preset"):
        lasem.reproduce("tiny", 1, [], quiet=True)


def test_a_plan_has_the_papers_optimiser_and_its_rate():
    plan = Plan(3, 1e-3, every=1, clip=0.0, optimizer={"name": "rmsprop", "alpha": 0.9, "eps": 1e-10}, decay=0.5)
    assert [plan.rate_in(epoch) for epoch in range(3)] == pytest.approx([1e-3, 1e-3 / 1.5, 1e-3 / 2])
    network = {**NETWORK, "dropout": 0.5}
    runs_of_both = [
        met(Selecting({"mode": "learned"}, configured(network, 8, 3, 2, 0)), made_up(8, 2, 0), plan, 0) for _ in range(2)
    ]
    first, second = runs_of_both
    assert first.peak == second.peak and first.end == second.end and len(first.end) == 2
    assert first.kept_of_end == pytest.approx(sum(f / e for f, e in zip(first.final, first.end, strict=True)) / 2)
    assert Plan(4, 1.0).rate_in(2) == pytest.approx(0.5)
