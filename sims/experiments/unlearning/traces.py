"""The traces that ways to remove a site leave: attacks, distances, relearning; and sites that leave in sequence."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.clients.data import label, site_examples, test_images
from fedloom.clients.networks import Model
from fedloom.clients.storage.states import write_state
from fedloom.conf import Config
from fedloom.server.unlearning.attacks import distance, time_to_relearn
from fedloom.server.unlearning.likelihood import Found, likelihood_ratio
from fedloom.server.unlearning.requests import SHARE_BACK
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.experiments.unlearning.averaging import sifu_bound, sifu_start
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
MAX_STEPS, EVERY = 60, 2  # steps of relearning, and steps between measurements
REGAIN = 0.9
Models = dict[str, tuple[Model, float]]  # by way: the network, and its seconds of training
RESTORE = 4  # rounds of restoration
BACK = {"restored": SHARE_BACK, "far back": 0.75}  # how far back it begins
NOISE, EPSILON, DELTA = 0.01, 10.0, 0.1  # of SIFU
WAYS = {
    "before": "before",
    "subtract": "subtract",
    "repair": f"subtract + {FURTHER} rounds of repair",
    "recalibrated": f"subtract + {FURTHER} rounds + recalibrated head",
    "restored": f"subtract, --restore {RESTORE}",
    "far back": f"subtract, --restore {RESTORE} --back 0.75",
    "replay": "FedEraser's replay",
    "sifu": "SIFU",
    "retrained": "retrained",
    "again": "retrained, other batches",
}


def tables(study: Study) -> list[Table]:
    """Return a table of the traces for each method, from at least SHADOWS federations."""
    many = replace(study, seeds=max(study.seeds, SHADOWS))
    return [table(method, many.saved_each(method, [SETTING, options, POOL, DRAWN], partial(shadow, method)))
            for method, options in METHODS.items()]  # fmt: skip


def shadow(method: str, seed: int) -> dict[str, Any]:
    """Train a federation, remove a site in every way, retrain twice from the same start; return the measurements by way."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = configured(method, seed, folder / "run")
        with opened(config) as run:
            looker = Looker(config, run.train().method.evaluator)
            models = {"before": (run.model(), run.seconds), "subtract": (run.model([LEAVER]), 0.0)}
            if method == "averaging":
                models["replay"] = _without(configured(method, seed, folder / "replay", changes=_replay(folder / "run")))
                models["sifu"] = _sifu(run, seed, folder)
            run.method.state.membership.forget([LEAVER], {})
            for way in FURTHER_WAYS[method]:
                models |= way(run, seed, folder)
        for name, prefix in (("retrained", "kept"), ("again", "twin")):
            models[name] = _without(configured(method, seed, folder / name, prefix))
    return {"was": membership(config).tolist(), "ways": {name: _look(looker, models, name, seed) for name in models}}


def _replay(earlier: Path) -> dict[str, Any]:
    """Return the changes of SETTING for FedEraser's rounds, with half as many epochs."""
    strategy = {"name": f"{MODULE}.averaging:Replay", "history": str(earlier)}
    return {"strategy": strategy, "training": {**SETTING["training"], "epochs": SETTING["training"]["epochs"] // 2}}


def _sifu(run: Shadow, seed: int, folder: Path) -> tuple[Model, float]:
    """Train again for the rounds that SIFU takes back, from its noisy start."""
    config, bound = run.method.config, sifu_bound(NOISE, EPSILON, DELTA)
    start, last = sifu_start(config, run.method.ledger, LEAVER, NOISE, bound)
    write_state(folder / "sifu.safetensors", start)
    strategy = {"name": f"{MODULE}.averaging:Averaging", "start": str(folder / "sifu.safetensors")}
    changes = {"strategy": strategy, "rounds": max(1, config.rounds - last)}
    return _without(configured("averaging", seed, folder / "sifu", changes=changes))


def _restored(run: Shadow, seed: int, folder: Path) -> Models:
    """Restore the aggregate in copies of the run, so that the other ways begin at the subtracted one."""
    models: Models = {}
    for name, share in BACK.items():
        with run.copied(name) as copy:
            models[name] = copy.restored(RESTORE, share), copy.seconds
    return models


def _repaired(run: Shadow, seed: int, folder: Path) -> Models:
    before = run.seconds
    return {"repair": (run.train(ROUNDS + FURTHER).model(), run.seconds - before)}


def _recalibrated(run: Shadow, seed: int, folder: Path) -> Models:
    before = run.seconds
    return {"recalibrated": (run.recalibrated(), run.seconds - before)}


FURTHER_WAYS: dict[str, tuple[Callable[[Shadow, int, Path], Models], ...]] = {
    "averaging": (_restored, _repaired),
    "exact": (_restored, _repaired, _recalibrated),
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
    """Return the steps on the site's images until REGAIN of the old accuracy is back; at most MAX_STEPS."""
    site, config = looker.config.roster[-1], looker.config
    test = test_images(config, site.spec)
    done = time_to_relearn(looker.evaluator.loaded(model), site_examples(config, site), test, REGAIN * before,
                           config.training, seed=seed, most=MAX_STEPS, every=EVERY)  # fmt: skip
    return MAX_STEPS if done.steps is None else done.steps


def table(method: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of a method's traces."""
    rows = [_row(name, results) for name in WAYS if name in results[0]["ways"]]
    head = ["way", "forgotten angle", "mean of retained", "U-LiRA: TPR at 1%", "AUC", "image drawn: TPR at 1%", "AUC",
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
            "attack sees one image's confidence. image drawn: did the site have the image? Chance: 1% and 0.5. Distances "
            "are to the retrained network of the same start; the last row is their floor. Relearning: steps until "
            f"{REGAIN:.0%} of the old accuracy is back ({MAX_STEPS}: never), {RELEARNED} federations.")  # fmt: skip


LEAVING = (LEAVER, "kept-1", "kept-2")  # in this order
SIDES = {
    "left": ("their angles", "their angles, restored", "their angles, retrained"),
    "stay": ("the others' angles", "the others' angles, restored", "the others' angles, retrained"),
}
ROWS = {
    "averaging": ("FedAvg: none", "FedAvg: 1", "FedAvg: 2", "FedAvg: 3"),
    "exact": ("sum aggregation: none", "sum aggregation: 1", "sum aggregation: 2", "sum aggregation: 3"),
}


def sequence(study: Study) -> list[Table]:
    """Return the table of sites that leave in sequence."""
    rows = []
    for method, options in METHODS.items():
        results = study.saved_each(f"sequence-{method}", [SETTING, options, LEAVING], partial(left, method))
        each = [[result[number] for result in results] for number in range(len(LEAVING) + 1)]
        rows += [[name, *_sides(number, each[number])] for number, name in enumerate(ROWS[method])]
    head = ["sites that left", *SIDES["left"], *SIDES["stay"]]
    note = ("Sites are subtracted in sequence. restored: the run is restored after each. Accuracy in %, mean over the "
            "angles on each side.")  # fmt: skip
    return [study.table("Requests one after the other", head, rows, note)]


def left(method: str, seed: int) -> list[dict[str, dict[str, float]]]:
    """Remove sites in turn; return at the start and after each the `sides` of the network, by way."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = configured(method, seed, folder / "run")
        with opened(config) as run:
            looker, gone = Looker(config, run.train().method.evaluator), [LEAVING[:number] for number in range(4)]
            results = [{"subtract": sides(looker, run.model(), [])}]
            with run.copied("restored") as copy:
                for names in gone[1:]:
                    for one in (run, copy):
                        one.method.state.membership.forget([names[-1]], {})
                    restored = sides(looker, copy.restored(RESTORE), names)
                    results.append({"subtract": sides(looker, run.model(), names), "restored": restored})
        for names, shares in zip(gone[1:], results[1:], strict=True):
            with opened(configured(method, seed, folder / f"without-{len(names)}"), names) as run:
                shares["retrained"] = sides(looker, run.train().model(), names)
    return results


def sides(looker: Looker, model: Any, gone: Sequence[str]) -> dict[str, float]:
    """Return the mean accuracy on test examples of the sites that left (`left`), and of the other sites (`stay`)."""
    shares = looker.evaluator.accuracy(model, "test")
    of = {site.name: shares[label(site.spec)] for site in looker.config.roster}
    left, stay = [of[name] for name in gone], [share for name, share in of.items() if name not in gone]
    return {"left": sum(left) / max(1, len(left)), "stay": sum(stay) / len(stay)}


def _sides(number: int, results: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return the cells of a row, in the order of SIDES, after `number` sites have left."""
    row = list[str]()
    for side in SIDES:
        for way in ("subtract", "restored", "retrained"):
            there = way in results[0] and (number or side == "stay")
            row += means(results, (way, side)) if there else [""]
    return row
