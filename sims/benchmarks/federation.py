"""A round of a real federation on this machine, beside the stock FedAvg app's over the same SuperLink and nodes."""

import itertools
import json
import statistics
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from clients.data import site_images
from conf import load
from conf.errors import FailedError
from conf.schema import Config
from conf.sites import roster
from server.evaluate import Evaluator
from server.listener import LogListener
from server.rounds.aggregation import Aggregation
from server.rounds.exchange import Federation
from server.rounds.loop import RoundLoop
from server.rounds.view import Setup
from sims.engines import open_engine
from sims.federation import local
from sims.federation.plan import CONNECTION, SERVER
from sims.federation.programs import BIN, environment
from sims.report.tables import Table

SITES, SAMPLES, WIDTHS, INPUTS, CLASSES = 3, 60, [400, 200, 100], 64, 10
ROUNDS, TURNS = 6, 2
MOST = 1.0  # times the stock app's time
LONGEST = 600.0  # seconds of a stock run
APP = {
    "project": {"name": "fedloom-stock", "version": "1.0.0", "description": "", "license": "Apache-2.0"},
    "tool": {"flwr": {"app": {
        "publisher": "fedloom",
        "components": {f"{half}app": f"sims.benchmarks.federation_stock:{half}" for half in ("server", "client")},
        "config": {"job": ""},
    }}},
}  # fmt: skip


def bench(quick: bool = False) -> tuple[Table, list[dict[str, Any]]]:
    """Both apps in turn, each in runs of its own; the first round of a run does not count."""
    seconds: dict[str, list[float]] = {"stock FedAvg": [], "fedloom": []}
    with tempfile.TemporaryDirectory(prefix="fedloom-bench-") as temporary:
        root = Path(temporary)
        config, folder = configured(root), root / "federation"
        write_data(config, root)
        try:
            local.up(folder, SITES, tls=True)
            for turn in range(1 if quick else TURNS):
                seconds["stock FedAvg"] += stock(config, folder, root / f"stock-{turn}")
                seconds["fedloom"] += ours(config, root / f"ours-{turn}")
        finally:
            local.down(folder)
    return table(seconds), [{"app": app, "seconds": each} for app, each in seconds.items()]


def configured(root: Path) -> Config:
    """FedAvg of three sites on a network of linear layers; nothing is evaluated."""
    entries = ", ".join([f"{{domain: digits, samples: {SAMPLES}}}"] * SITES)
    return load("digits", [
        f"sites=[{entries}]", f"network={{name: mlp, widths: {WIDTHS}}}", "objective.mode=fedavg", "baselines=[]",
        "data.size=8", "training.epochs=1", "training.batch=32", f"rounds={2 * ROUNDS}", "evaluation.every=1000000",
        "run.name=bench", f"run.root={root}", "engine.name=flower", f"engine.address={root / 'federation'}",
    ])  # fmt: skip


def write_data(config: Config, root: Path) -> None:
    """The sites' images as files that the stock app reads."""
    for site in roster(config):
        images = site_images(config, site)
        np.savez(root / f"{site.name}.npz", x=images.x.numpy(), y=images.y.numpy())


def ours(config: Config, folder: Path) -> list[float]:
    """Seconds of rounds of this project's loop: asking, checking, adding up, committing."""
    with open_engine(config) as grid:
        federation = Federation(grid, roster(config), config.federation.window)
        federation.join(config.federation.join_timeout)
        aggregation = Aggregation(Setup(config, roster(config), folder))
        loop = RoundLoop(config, folder.name, federation, aggregation, Evaluator(config), LogListener())
        records = [loop.one(round) for round in range(1, ROUNDS + 1)]
        aggregation.ledger.close()
    if dropped := next((record["dropped"] for record in records if record["dropped"]), None):
        raise FailedError(f"a round lost a site, and does not count: {dropped}")
    return [record["seconds"] for record in records[1:]]


def stock(config: Config, folder: Path, out: Path) -> list[float]:
    """The same of the stock app, started by `flwr run`."""
    training, app = config.training, out / "app"
    app.mkdir(parents=True)
    job = {"data": str(out.parent), "widths": WIDTHS, "inputs": INPUTS, "classes": CLASSES, "rounds": ROUNDS, "sites": SITES,
           "ends": str(out / "ends.json"), "threads": config.engine.threads,
           **{key: asdict(training)[key] for key in ("rate", "momentum", "epochs", "batch")}}  # fmt: skip
    pyproject = {**APP, "tool": {"flwr": {"app": {**APP["tool"]["flwr"]["app"], "config": {"job": json.dumps(job)}}}}}
    (app / "pyproject.toml").write_text(tomli_w.dumps(pyproject), encoding="utf-8")
    home = {"FLWR_HOME": str((folder / SERVER / "flwr").resolve())}
    words = [str(BIN / "flwr"), "run", str(app), CONNECTION, "--stream"]
    done = subprocess.run(words, env=environment(home), cwd=app, capture_output=True, text=True, timeout=LONGEST)
    try:
        ends = json.loads((out / "ends.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        ends = []
    if len(ends) <= ROUNDS:
        raise FailedError(f"the stock app did not get through: {(done.stdout + done.stderr)[-500:]}")
    return [later - before for before, later in itertools.pairwise(ends)][1:]


def table(seconds: dict[str, list[float]]) -> Table:
    """Medians and ranges of the rounds' seconds, and their ratio."""
    lines = [[app, f"{statistics.median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}", len(each)]
             for app, each in seconds.items()]  # fmt: skip
    ratio = statistics.median(seconds["fedloom"]) / statistics.median(seconds["stock FedAvg"])
    note = f"{SITES} sites of {SAMPLES} images on this machine, TLS and node keys: {ratio:.2f} times; bar: at most {MOST:g}."
    return Table("A round of a real federation, seconds", ["app", "median", "range", "rounds"], lines, note)
