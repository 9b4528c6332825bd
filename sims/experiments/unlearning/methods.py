"""Ways to remove a site, side by side on rotated_digits: subtraction, repair, rolling back, retraining."""

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.clients.data import label
from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.server.ledger import Ledger
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.sims.operations.simulate import simulate_once
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.spread import mean_and_spread, spread
from fedloom.sims.report.tables import Table

ROOT = Path("runs/reproduce-unlearning")
REPAIR = 3
NOTE = (
    "Accuracy in % on test images, AUC of membership attacks on the forgotten site's training images; mean and standard "
    "deviation over seeds (seed s forgets site s). Seconds: subtraction and rounds, without measuring. Retrained: the same "
    "rounds from the start without the site; rolling back repeats them bit for bit if the site was there from the first on."
)


@dataclass(frozen=True)
class Way:
    """A way to remove a site from a run trained with `subsets` (for leave-one-out sums) or without."""

    subsets: bool
    repair: int = 0
    rollback: bool = False
    retrain: bool = False


WAYS = {
    "subtract": Way(subsets=False, retrain=True),
    "subtract, trained for leave-one-out": Way(subsets=True),
    f"subtract + {REPAIR} rounds of repair": Way(subsets=False, repair=REPAIR),
    "roll back": Way(subsets=False, rollback=True),
}


def tables(seeds: int, overrides: Sequence[str], *, quiet: bool) -> list[Table]:
    """Train, remove a site in every way; runs that are finished are taken as they are."""
    return [_table([measured(seed, overrides, quiet) for seed in range(seeds)])]


def measured(seed: int, overrides: Sequence[str], quiet: bool) -> dict[str, dict[str, float]]:
    """By way: accuracy on the forgotten and the retained domains, AUCs, seconds."""
    results: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        base = load("rotated_digits", [
            "sites=5", f"seed={seed}", "engine.name=inline", "federation.history=all", f"run.root={ROOT}",
            f"run.name={'subsets' if way.subsets else 'plain'}-{seed}",
            *([] if way.subsets else ["objective.subset_probability=0"]), *overrides,
        ])  # fmt: skip
        simulate_once(base, listener=listener_for(quiet))
        site = base.roster[seed % len(base.roster)].name
        done, seconds = _removed(base, site, name, way, quiet)
        evidence = done["evidence"]
        if "before" not in results:
            results["before"] = _row(base, site, evidence["before"], 0.0)
        results[name] = _row(base, site, evidence["after"], seconds)
        if "retrained" in evidence:
            rounds = RunFolder(_copy(base, name) / "retrained" / "request").metrics().values()
            results["retrained"] = _row(base, site, evidence["retrained"], sum(record["seconds"] for record in rounds))
    return results


def _removed(base: Config, site: str, name: str, way: Way, quiet: bool) -> tuple[dict[str, Any], float]:
    """The certificate of a request to a copy of the run, and the seconds of subtraction and further rounds."""
    copy = _copy(base, name)
    certificate = copy / "certificates" / "request.json"
    if not certificate.is_file():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(Path(base.run.root) / base.run.name, copy)
        asked = UnlearningRequest([site], "request", "measured", way.repair, way.retrain, way.rollback)
        unlearn(copy, asked, listener=listener_for(quiet))
    with Ledger.open(copy, server=False) as ledger:
        (seconds,) = (event.body["seconds"] for event in ledger.events() if event.kind == "subtracted")
    further = RunFolder(copy).metrics() if way.repair or way.rollback else {}
    after = read_config(copy).rounds if way.repair else 0
    seconds += sum(record["seconds"] for round, record in further.items() if round > after)
    return json.loads(certificate.read_text(encoding="utf-8")), seconds


def _copy(base: Config, name: str) -> Path:
    return ROOT / f"{base.run.name}-{''.join(letter for letter in name if letter.isalnum())}"


def _row(config: Config, site: str, stage: Mapping[str, Any], seconds: float) -> dict[str, float]:
    (own,) = (label(each.spec) for each in config.roster if each.name == site)
    retained = [share for domain, share in stage["accuracy"].items() if domain not in (own, "union")]
    attacks = stage["membership"][site]
    return {"forgotten": stage["accuracy"][own], "retained": statistics.mean(retained),
            "loss": attacks["loss"]["auc"], "logistic": attacks["logistic"]["auc"], "seconds": seconds}  # fmt: skip


def _table(results: Sequence[Mapping[str, Mapping[str, float]]]) -> Table:
    rows = []
    for way in results[0]:
        runs = {key: [result[way][key] for result in results] for key in results[0][way]}
        shares = [mean_and_spread(runs[key]) for key in ("forgotten", "retained")]
        others = [spread(runs[key]).text(digits) for key, digits in (("loss", 3), ("logistic", 3), ("seconds", 2))]
        rows.append([way, *shares, *others])
    head = ["way", "forgotten domain", "mean of retained", "AUC, loss", "AUC, logistic", "seconds"]
    return Table(f"Ways to remove a site: rotated_digits, 5 sites, {len(results)} seeds", head, rows, NOTE)
