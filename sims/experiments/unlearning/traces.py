"""The traces that ways to remove a site leave: attacks on single images, distances, and relearning."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.clients.data import site_images, test_images
from fedloom.clients.networks import Model
from fedloom.clients.storage.states import write_state
from fedloom.conf import Config
from fedloom.server.unlearning.attacks import distance, time_to_relearn
from fedloom.server.unlearning.likelihood import Found, likelihood_ratio
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.experiments.unlearning.shadows import (
    DRAWN,
    FURTHER,
    LEAVER,
    METHODS,
    MODULE,
    POOL,
    ROUNDS,
    SETTING,
    Looker,
    Shadow,
    configured,
    membership,
    opened,
)
from fedloom.sims.report.tables import Table

SHADOWS = 8  # federations of an attack on single images
RELEARNED = 3  # federations in which the steps to relearn are measured
MOST, EVERY = 60, 2  # steps of relearning, and steps between measurements
REGAIN = 0.9
Models = dict[str, tuple[Model, float]]  # by way: the network, and its seconds of training
AS_ONE, RATE = 4, 0.1  # rounds and rate of training the aggregate as one network; chosen with seeds 100 to 102
WAYS = {
    "before": "before",
    "subtract": "subtract",
    "repair": f"subtract + {FURTHER} rounds of repair",
    "recalibrated": f"subtract + {FURTHER} rounds + recalibrated head",
    "as one": f"subtract + {AS_ONE} rounds as one network",
    "halved": f"subtract + {AS_ONE} rounds from half-way back",
    "replay": "FedEraser's replay",
    "retrained": "retrained",
    "again": "retrained, other batches",
}


def tables(study: Study) -> list[Table]:
    """Return a table for each method, from at least SHADOWS federations."""
    many = replace(study, seeds=max(study.seeds, SHADOWS))
    return [table(method, many.saved_each(method, [SETTING, options, POOL, DRAWN], partial(shadow, method)))
            for method, options in METHODS.items()]  # fmt: skip


def shadow(method: str, seed: int) -> dict[str, Any]:
    """Train a federation, remove the site in every way, and train without it twice from the same start."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = configured(method, seed, folder / "run")
        with opened(config) as run:
            looker = Looker(config, run.train().method.evaluator)
            models = {"before": (run.model(), run.seconds), "subtract": (run.model([LEAVER]), 0.0)}
            if method == "averaging":
                models["replay"] = _without(configured(method, seed, folder / "replay", changes=_replay(folder / "run")))
            run.method.state.forget([LEAVER], {})
            for way in FURTHER_WAYS[method]:
                models |= way(run, seed, folder)
        for name, prefix in (("retrained", "kept"), ("again", "twin")):
            models[name] = _without(configured(method, seed, folder / name, prefix))
    return {"was": membership(config).tolist(), "ways": {name: _look(looker, models, name, seed) for name in models}}


def _replay(earlier: Path) -> dict[str, Any]:
    """Return the changes of SETTING for FedEraser's rounds, with half as many epochs."""
    strategy = {"name": f"{MODULE}.averaging:Replay", "history": str(earlier)}
    return {"strategy": strategy, "training": {**SETTING["training"], "epochs": SETTING["training"]["epochs"] // 2}}


def _as_one(run: Shadow, seed: int, folder: Path) -> Models:
    """Train the aggregate as one network, from its current state, and from half of the way back to the start."""
    start, models = folder / "subtracted.safetensors", {}
    write_state(start, run.model().state)
    for name, share in (("as one", 1.0), ("halved", 0.5)):
        strategy = {"name": f"{MODULE}.averaging:Averaging", "start": str(start), "share": share}
        changes = {"strategy": strategy, "rounds": AS_ONE, "training": {**SETTING["training"], "rate": RATE}}
        models[name] = _without(configured("averaging", seed, folder / f"one-{share}", changes=changes))
    return models


def _repaired(run: Shadow, seed: int, folder: Path) -> Models:
    before = run.seconds
    return {"repair": (run.train(ROUNDS + FURTHER).model(), run.seconds - before)}


def _recalibrated(run: Shadow, seed: int, folder: Path) -> Models:
    before = run.seconds
    return {"recalibrated": (run.recalibrated(), run.seconds - before)}


FURTHER_WAYS: dict[str, tuple[Callable[[Shadow, int, Path], Models], ...]] = {
    "averaging": (_repaired,),
    "exact": (_as_one, _repaired, _recalibrated),
}


def _without(config: Config) -> tuple[Model, float]:
    with opened(config, [LEAVER]) as run:
        return run.train().model(), run.seconds


def _look(looker: Looker, models: Models, name: str, seed: int) -> dict[str, Any]:
    (model, seconds), (retrained, _) = models[name], models["retrained"]
    seen = {**looker.accuracy(model), "seconds": seconds, "confidences": looker.confidences(model).tolist(),
             "distance": distance(model.state, retrained.state)["relative"],
             "apart": looker.apart(model, retrained)}  # fmt: skip
    if seed < RELEARNED:
        seen["relearned"] = _steps(looker, model, looker.accuracy(models["before"][0])["forgotten"], seed)
    return seen


def _steps(looker: Looker, model: Model, before: float, seed: int) -> int:
    """Return the steps on the site's images until REGAIN of the old accuracy is back; at most MOST."""
    site, config = looker.config.roster[-1], looker.config
    test = test_images(config, site.spec)
    done = time_to_relearn(looker.evaluator.loaded(model), site_images(config, site), test, REGAIN * before,
                           config.training, seed=seed, most=MOST, every=EVERY)  # fmt: skip
    return MOST if done.steps is None else done.steps


def table(method: str, results: Sequence[Mapping[str, Any]]) -> Table:
    rows = [_row(name, results) for name in WAYS if name in results[0]["ways"]]
    head = ["way", "forgotten angle", "mean of retained", "U-LiRA: TPR at 1 %", "AUC", "image drawn: TPR at 1 %", "AUC",
            "distance of weights", "of outputs", "steps to relearn", "seconds"]  # fmt: skip
    return Table(f"Traces of a removed site: {method}, {len(results)} federations", head, rows, _note(method))


def _row(name: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    ways, was = [each["ways"][name] for each in results], np.array([each["was"] for each in results])
    so, never = (np.array([each["ways"][way]["confidences"] for each in results]) for way in (name, "retrained"))
    site = [] if name == "retrained" else _attack(likelihood_ratio(so, never, was, was))
    steps = [result["relearned"] for result in ways if "relearned" in result]
    distance, apart, seconds = (statistics.fmean(way[key] for way in ways) for key in ("distance", "apart", "seconds"))
    return [WAYS[name], *means(ways, ("forgotten",), ("retained",)), *(site or ["", ""]),
            *_attack(likelihood_ratio(so, so, was, ~was)), f"{distance:.2f}", f"{apart:.2f}",
            f"{statistics.fmean(steps):.0f}", f"{seconds:.1f}"]  # fmt: skip


def _attack(attack: Found) -> list[str]:
    return [f"{100 * attack.rate:.1f}", f"{attack.area:.2f}"]


def _note(method: str) -> str:
    kinds = {"averaging": "FedAvg that stores contributions", "exact": "sum aggregation, trained for leave-one-out"}
    return (f"{kinds[method]}. Accuracy in %. U-LiRA: was the site removed in this way, or was the network retrained? The "
            "attack sees one image's confidence. image drawn: did the site have the image? Chance: 1 % and 0.5. Distances "
            "are to the retrained network of the same start; the last row is their floor. Relearning: steps until "
            f"{REGAIN:.0%} of the old accuracy is back ({MOST}: never), {RELEARNED} federations.")  # fmt: skip
