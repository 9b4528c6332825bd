"""Ways to remove a site from a run of rotated_digits: subtraction, repair, rolling back, retraining."""

import json
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.clients.data import label
from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.server.ledger import Ledger
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.sims.experiments.study import Study, means, slug
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.spread import spread
from fedloom.sims.report.tables import Table

REPAIR = 3
NOTE = (
    "Accuracy in % on test examples. AUC of membership attacks on the forgotten site's training examples. Mean and "
    "standard deviation over seeds (seed s forgets site s). seconds: subtraction and rounds, without measuring. "
    "retrained: the same rounds from the start without the site. Rolling back repeats them bit for bit if the site "
    "participated from the first round."
)


@dataclass(frozen=True)
class Way:
    """A way to remove a site from a run.

    Attributes:
        subsets: Whether the run is trained for leave-one-out sums (option `subsets`).
        repair: Rounds of training after the subtraction.
        rollback: Whether to go back to before the site participated, and train again.
        retrain: Whether to train a network without the site, for comparison.
    """

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


def tables(study: Study) -> list[Table]:
    """Return the table of ways to remove a site."""
    results, rows = study.each_seed(lambda seed: measured(study, seed)), []
    for way in results[0]:
        others = [spread([result[way][key] for result in results]).text(digits)
                  for key, digits in (("loss", 3), ("logistic", 3), ("seconds", 2))]  # fmt: skip
        rows.append([way, *means(results, (way, "forgotten"), (way, "retained")), *others])
    head = ["way", "forgotten domain", "mean of retained", "AUC, loss", "AUC, logistic", "seconds"]
    return [study.table("Ways to remove a site: rotated_digits, 5 sites", head, rows, NOTE)]


def measured(study: Study, seed: int) -> dict[str, dict[str, float]]:
    """Remove a site in every way; return by way its accuracy on forgotten and retained domains, AUCs and seconds."""
    results: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        base = load("rotated_digits", [
            "sites=5", f"seed={seed}", "engine.name=inline", "federation.history=all", f"run.root={study.folder}",
            f"run.name={'subsets' if way.subsets else 'plain'}-{seed}",
            *([] if way.subsets else ["objective.subset_probability=0"]), *study.overrides,
        ])  # fmt: skip
        study.runs([base])
        site, copy = base.roster[seed % len(base.roster)].name, study.folder / f"{base.run.name}-{slug(name)}"
        evidence, seconds = _removed(study, base, copy, site, way)
        results.setdefault("before", _row(base, site, evidence["before"], 0.0))
        results[name] = _row(base, site, evidence["after"], seconds)
        if "retrained" in evidence:
            rounds = RunFolder(copy / "retrained" / "request").metrics().values()
            results["retrained"] = _row(base, site, evidence["retrained"], sum(record["seconds"] for record in rounds))
    return results


def _removed(study: Study, base: Config, copy: Path, site: str, way: Way) -> tuple[dict[str, Any], float]:
    """Return the evidence of a request to a copy of the run, and the seconds of subtraction and further rounds."""
    certificate = copy / "certificates" / "request.json"
    if not certificate.is_file():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(Path(base.run.root) / base.run.name, copy)
        ways = {"repair": way.repair, "retrain": way.retrain, "rollback": way.rollback}
        request = UnlearningRequest([site], "request", "measured", **ways)
        unlearn(copy, request, listener=listener_for(study.quiet))
    with Ledger.open(copy, server=False) as ledger:
        (seconds,) = (event.body["seconds"] for event in ledger.events() if event.kind == "subtracted")
    further = RunFolder(copy).metrics() if way.repair or way.rollback else {}
    after = read_config(copy).rounds if way.repair else 0
    seconds += sum(record["seconds"] for round, record in further.items() if round > after)
    return json.loads(certificate.read_text(encoding="utf-8"))["evidence"], seconds


def _row(config: Config, site: str, stage: Mapping[str, Any], seconds: float) -> dict[str, float]:
    (own,) = (label(each.spec) for each in config.roster if each.name == site)
    retained = [share for domain, share in stage["accuracy"].items() if domain not in (own, "union")]
    attacks = stage["membership"][site]
    return {"forgotten": stage["accuracy"][own], "retained": statistics.mean(retained),
            "loss": attacks["loss"]["auc"], "logistic": attacks["logistic"]["auc"], "seconds": seconds}  # fmt: skip
