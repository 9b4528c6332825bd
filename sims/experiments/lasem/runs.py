"""The runs of the tables: a learner on a sequence of tasks with a seed. Each is made once."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config
from fedloom.sims.experiments.lasem.comparators import Apd, Darts, Progressive
from fedloom.sims.experiments.lasem.lifelong import Learner, Outcome, Plan, met
from fedloom.sims.experiments.lasem.selecting import Selecting, configured
from fedloom.sims.experiments.lasem.tasks import SEQUENCES
from fedloom.sims.experiments.study import Study, fingerprint

LEARNERS = {"HPS": "hps", "TF": "tf", "DF-CNN": "df_cnn"}  # as the paper calls them
COMPARED: dict[str, Callable[[Config], Learner]] = {
    "ProgNN": Progressive,
    "APD-Net": Apd,
    "DARTS HPS": lambda config: Darts(config, "hps"),
    "DARTS DF-CNN": lambda config: Darts(config, "df_cnn"),
}
Options = Mapping[str, Any]
PLAN = {"epochs": (int, "a whole number"), "rate": (float, "a number")}  # of each task, which overrides may change
MAX_OVERRIDE = 1e6


@dataclass(frozen=True)
class TaskSequence:
    """A sequence of tasks, and how a learner is trained on each.

    Attributes:
        title: Its name in tables.
        tasks: A key of SEQUENCES.
        number: The number of tasks.
        size: Pixels of an image's side.
        network: The section `network` of a configuration.
        plan: The training of each task.
        paper: The paper's name for the sequence.
    """

    title: str
    tasks: str
    number: int
    size: int
    network: Options
    plan: Plan
    paper: str = ""


CNN4 = {"name": "convnet", "widths": [32, 32, 64, 64], "pools": [2, 4], "hidden": [64], "norm": "none", "bias": True}
DROPPING = {**CNN4, "dropout": 0.5}
RMSPROP = {"name": "rmsprop", "alpha": 0.9, "eps": 1e-10}


def as_published(epochs: int, decay: float) -> Plan:
    """Return the plan of the authors' code: RMSProp without clipping. `decay` of the rate: see `Plan`."""
    return Plan(epochs, 1e-4, clip=0.0, optimizer=RMSPROP, decay=decay)


LONG = as_published(2000, 1 / 4000)
RESNET = {"name": "resnet18", "norm": "group", "groups": 8}
SIZES: dict[str, dict[str, TaskSequence]] = {
    "cpu": {
        "cifar100": TaskSequence("CIFAR-100, 10 tasks", "cifar100", 10, 16, CNN4, Plan(40, 0.03), "CIFAR-100"),
        "digits": TaskSequence("digits, 12 tasks", "digits", 12, 16, CNN4, Plan(20, 0.03)),
        "resnet": TaskSequence(
            "CIFAR-100, 10 tasks, ResNet-18 of a quarter of the width", "cifar100", 10, 16, {**RESNET, "width": 0.25},
            Plan(40, 0.03), "10 tasks",
        ),
    },
    "paper": {
        "cifar100": TaskSequence("CIFAR-100, 10 tasks", "cifar100", 10, 32, DROPPING, LONG, "CIFAR-100"),
        "digits": TaskSequence("digits, 20 tasks", "digits", 20, 32, DROPPING, as_published(500, 0.0)),
        "resnet": TaskSequence("CIFAR-100, 10 tasks, ResNet-18", "cifar100", 10, 32, RESNET, LONG, "10 tasks"),
        "resnet40": TaskSequence("CIFAR-100, 40 tasks, ResNet-18", "cifar100", 40, 32, RESNET, LONG, "40 tasks"),
    },
}  # fmt: skip


def sequences_of(study: Study) -> dict[str, TaskSequence]:
    """Return the task sequences that the study selects, by name, without those of ResNets."""
    return {name: sequence for name, sequence in SIZES[study.preset].items()
            if "resnet" not in name and (not study.only or name in study.only)}  # fmt: skip


def named(study: Study, name: str) -> TaskSequence:
    """Return the task sequence `name`, its plan changed by the study's overrides."""
    sequence = SIZES[study.preset][name]
    return dataclasses.replace(sequence, plan=dataclasses.replace(sequence.plan, **plan_of(study.overrides)))


def plan_of(overrides: Sequence[str]) -> dict[str, float]:
    """Return the fields of Plan that the overrides epochs= and rate= change. Raises UserError for others and bad values."""
    plan: dict[str, float] = {}
    for word in overrides:
        key, _, value = word.partition("=")
        if key not in PLAN:
            raise unknown("override", key, [*PLAN, "tables", "sequences"])
        kind, takes = PLAN[key]
        try:
            plan[key] = kind(value)
        except ValueError:
            raise UserError(f"{key}: got '{value}', takes {takes}") from None
        if not 0 < plan[key] < MAX_OVERRIDE:
            raise UserError(f"{key}: got {value}, takes {takes} above 0")
    return plan


def each(study: Study, name: str, what: Options | str) -> list[Outcome]:
    """Train on the task sequence `name` with every seed, and return the outcomes.

    `what` has options of the objective (LASEM or a fixed configuration), or the name of another method (COMPARED).
    """
    return [_found(study, name, what, seed) for seed in range(study.seeds)]


def _found(study: Study, name: str, what: Options | str, seed: int) -> Outcome:
    sequence = named(study, name)
    key = [sequence, what, seed]

    def make() -> dict[str, Any]:
        tasks = SEQUENCES[sequence.tasks](sequence.size, sequence.number, seed)
        config = configured(sequence.network, sequence.size, tasks[0].classes, sequence.number, seed)
        learner = COMPARED[what](config) if isinstance(what, str) else Selecting(what, config)
        return dataclasses.asdict(met(learner, tasks, sequence.plan, seed))

    label = f"{name}, seed {seed}, {what if isinstance(what, str) else json.dumps(what)}"
    return Outcome(**study.once(f"{name}-{seed}-{fingerprint(key)}", key, make, label))


def of(learner: str, mode: str = "learned", **more: Any) -> dict[str, Any]:
    """Return objective options: a base learner (a key of LEARNERS), and a fixed configuration or "learned" (LASEM)."""
    return {"mode": mode, "learner": {"name": LEARNERS[learner]}, **more}
