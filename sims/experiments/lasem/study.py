"""What the tables are made of: a learner on a sequence of tasks with a seed, made once, and kept on disk."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.conf.schema import Config
from fedloom.sims.experiments.kept import fingerprint
from fedloom.sims.experiments.lasem.comparators import Apd, Darts, Progressive
from fedloom.sims.experiments.lasem.lifelong import Learner, Outcome, Plan, met
from fedloom.sims.experiments.lasem.selecting import Selecting, configured
from fedloom.sims.experiments.lasem.tasks import SEQUENCES
from fedloom.sims.experiments.study import Study

LEARNERS = {"HPS": "hps", "TF": "tf", "DF-CNN": "df_cnn"}  # as the paper calls them
COMPARED: dict[str, Callable[[Config], Learner]] = {
    "ProgNN": Progressive,
    "APD-Net": Apd,
    "DARTS HPS": lambda config: Darts(config, "hps"),
    "DARTS DF-CNN": lambda config: Darts(config, "df_cnn"),
}
Options = Mapping[str, Any]


@dataclass(frozen=True)
class TaskSequence:
    """Tasks, and how they are trained. `title`: in tables; `paper`: the paper's sequence that stands beside it."""

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
    """The plan of the authors' code: RMSProp without clipping. `decay`: of the rate, for each epoch."""
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


@dataclass(frozen=True)
class LasemStudy(Study):
    """A preset's runs, in a folder. `only`: the sequences that are asked for. `plan`: what is changed of every plan."""

    plan: Options = dataclasses.field(default_factory=dict)

    @property
    def sequences(self) -> dict[str, TaskSequence]:
        """Those that are asked for, without those of deep networks."""
        return {name: sequence for name, sequence in SIZES[self.preset].items()
                if "resnet" not in name and (not self.only or name in self.only)}  # fmt: skip

    def named(self, name: str) -> TaskSequence:
        """A sequence, with the plan that is asked for."""
        sequence = SIZES[self.preset][name]
        return dataclasses.replace(sequence, plan=dataclasses.replace(sequence.plan, **self.plan))

    def selecting(self, name: str, options: Options, seed: int) -> Outcome:
        """LASEM, or a given configuration (options of the objective)."""
        return self._found(name, dict(options), lambda config: Selecting(options, config), seed)

    def each(self, name: str, options: Options, seeds: int) -> list[Outcome]:
        """Of every seed."""
        return [self.selecting(name, options, seed) for seed in range(seeds)]

    def compared(self, name: str, method: str, seeds: int) -> list[Outcome]:
        """Another method (COMPARED), of every seed."""
        return [self._found(name, method, COMPARED[method], seed) for seed in range(seeds)]

    def _found(self, name: str, what: Any, make: Callable[[Config], Learner], seed: int) -> Outcome:
        sequence = self.named(name)
        key = [dataclasses.asdict(sequence), what, seed]

        def measure() -> dict[str, Any]:
            tasks = SEQUENCES[sequence.tasks](sequence.size, sequence.number, seed)
            config = configured(sequence.network, sequence.size, tasks[0].classes, sequence.number, seed)
            return dataclasses.asdict(met(make(config), tasks, sequence.plan, seed))

        def line(fields: Mapping[str, Any]) -> str:
            outcome, learner = Outcome(**fields), json.dumps(what) if isinstance(what, dict) else what
            numbers = f"peak {outcome.accuracy:.1%}, final / peak {outcome.kept:.2f}, {outcome.seconds:.0f} s"
            return f"{name}, seed {seed}, {learner}: {numbers}"

        return Outcome(**self.once(f"{name}-{seed}-{fingerprint(key)}", key, measure, line))


def of(learner: str, mode: str = "learned", **more: Any) -> dict[str, Any]:
    """Options of the objective: a base learner (a key of LEARNERS) with a configuration, or LASEM."""
    return {"mode": mode, "learner": {"name": LEARNERS[learner]}, **more}
