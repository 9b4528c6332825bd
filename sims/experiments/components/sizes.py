"""The presets of the experiments on compatible components, and the ways to make components compatible."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]  # values of a configuration, by dotted key


@dataclass(frozen=True)
class Task:
    """Two sites, and settings of the configuration.

    `classes`: number of outputs, for the level of chance. `points`: where Figure 8 cuts the network `whole`. `turns` of each
    image for rotation heads: "one", or "all" as in the paper.
    """

    title: str
    sites: Sequence[Settings]
    settings: Settings = field(default_factory=dict)
    classes: int = 10
    whole: Settings = field(default_factory=dict)
    points: Sequence[str] = ()
    turns: str = "one"

    @property
    def all(self) -> dict[str, Any]:
        """The settings, including the sites."""
        return {**self.settings, "sites": list(self.sites)}


@dataclass(frozen=True)
class Size:
    """One preset of `fedloom reproduce components`.

    Attributes:
        tasks: The tasks, by name. Tables on details use the first.
        plans: Pairs (steps of a round, rounds). Only the table of local steps uses more than the first.
        most: The numbers of common classes in Figure 9.
        several: The numbers of sites.
        settings: The settings of all tasks.
    """

    tasks: Mapping[str, Task]
    plans: Sequence[tuple[int, int]]
    most: Sequence[int]
    several: Sequence[int]  # sites
    settings: Settings = field(default_factory=dict)


def _cpu() -> Size:
    points = [f"block{index}" for index in (1, 3, 5, 6)]
    digits = {
        "whole": {"name": "convnet", "widths": [16, 32, 64, 64, 64, 24], "strides": [1, 2, 1, 1, 1, 2]},
        "points": points,
    }
    usps, mnist_m, mnist = {"domain": "usps"}, {"domain": "mnist_m", "samples": 6500}, {"domain": "mnist", "samples": 6500}
    residual = {"name": "resnet20", "width": 0.5}
    cifar: dict[str, Any] = {
        "settings": {
            "network": {"name": "split", "of": residual, "at": "stage2"},
            "rounds": 24,
            "training.weight_decay": 1e-4,
        },
        "turns": "all",
        "whole": residual,
        "points": ["stem", "stage1", "stage2", "stage3"],
    }
    half = {"domain": "cifar10", "samples": 20000}
    tasks = {
        "usps_mnistm": Task("USPS / MNIST-M", [usps, mnist_m], **digits),
        "mnist_usps": Task("MNIST / USPS", [mnist, usps], **digits),
        "cifar": Task("CIFAR-10, two halves", [{**half, "count": 2}], **cifar),
        "cifar100": Task("CIFAR-10 / CIFAR-100", [{**half, "samples": 4500},
                                                  {"domain": "cifar100", "classes": LIKE_TEN, "relabel": True}],
                         settings={**cifar["settings"], "data.heads": "own", "strategy.alike": ALIKE}, turns="all"),
    }  # fmt: skip
    settings = {"data.test_limit": 2000, "engine.name": "inline"}
    return Size(tasks, plans=((25, 12), (5, 60), (100, 3)), most=(2, 4, 6, 8, 9, 10), several=(2, 4, 6), settings=settings)


# similar classes of CIFAR-10 and CIFAR-100; birds and ships have none
ALIKE = [["airplane", "rocket"], ["automobile", "pickup_truck"], ["truck", "bus"], ["cat", "leopard"], ["dog", "wolf"],
         ["deer", "cattle"], ["horse", "camel"], ["frog", "lizard"]]  # fmt: skip
LIKE_TEN = [13, 14, 15, 19, 42, 44, 58, 69, 81, 97]  # these eight classes of CIFAR-100, butterfly and streetcar


def _paper() -> Size:
    """Return the paper's data, network, optimiser and number of steps. Adam starts again in each round."""
    network = {"name": "resnet56"}
    settings = {
        "network": {"name": "split", "of": network, "at": "stage2"},
        "data.size": 32,
        "data.heads": "own",
        "strategy.alike": [["automobile", "car"]],
        "data.download": True,
        "rounds": 800,
        "training.steps": 25,
        "training.batch": 512,
        "training.rate": 0.01,
        "training.optimizer": {"name": "adam", "weight_decay": 1e-7},
        "training.schedule": {"name": "step", "every": 200},
    }
    task = Task("CIFAR-10 / STL-10", [{"domain": "cifar10"}, {"domain": "stl10"}], settings, classes=9, whole=network,
                points=["stem", "stage1", "stage2", "stage3"], turns="all")  # fmt: skip
    both = Task("CIFAR-10, two halves", [{"domain": "cifar10", "count": 2}], settings, whole=network, turns="all")
    plans = ((25, 800), (5, 4000), (100, 200))
    return Size({"cifar_stl": task, "cifar": both}, plans, most=tuple(range(2, 10)), several=(2, 4, 6))


SIZES = {"cpu": _cpu(), "paper": _paper()}


PULLS = {"as the paper": 0.0, "pulled": 0.1}  # columns; objective.pull
DCC, ALL = "DCC", "IIW+RP+DCC"
INDEPENDENT, IIW = "independent", "IIW"


@dataclass(frozen=True)
class Way:
    """Settings that make heads exchangeable. `pulls`: objective.pull applies, because there is a head of common classes."""

    settings: Mapping[str, Any]
    pulls: bool = False

    def pulled(self, pull: float) -> dict[str, Any]:
        """Return the settings, with `pull` as objective.pull if it applies."""
        return {**self.settings, **({"objective.pull": pull} if self.pulls else {})}

    @property
    def columns(self) -> dict[str, float]:
        """The entries of PULLS (columns) that give different results."""
        return PULLS if self.pulls else dict(list(PULLS.items())[:1])


def _heads(*tasks: str, same: bool = False) -> Way:
    return Way({"objective.auxiliary": list(tasks), "objective.same_start": same, "objective.pull": 0.0}, "dcc" in tasks)


# RP: predict rotations. DCC: classify the common classes. IIW: start from identical weights.
WAYS = {
    INDEPENDENT: Way({"objective.mode": "alone"}),
    IIW: Way({"objective.auxiliary": [], "objective.same_start": True}),
    "RP": _heads("rp"),
    DCC: _heads("dcc"),
    "IIW+RP": _heads("rp", same=True),
    "IIW+DCC": _heads("dcc", same=True),
    "RP+DCC": _heads("dcc", "rp"),
    ALL: _heads("dcc", "rp", same=True),
}
