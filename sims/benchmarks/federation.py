"""A round of a real federation on this machine, beside the stock FedAvg app's over the same SuperLink and nodes."""

import itertools
import json
import statistics
import subprocess
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedloom.clients.data import site_images
from fedloom.conf import load
from fedloom.conf.errors import FailedError
from fedloom.conf.schema import Config
from fedloom.server.run.training_run import one_round
from fedloom.sims.engines import open_engine
from fedloom.sims.federation import local, sheets
from fedloom.sims.federation.plan import CONNECTION, SERVER, Plan, sites_of, write_plan
from fedloom.sims.federation.programs import BIN, environment, free_port
from fedloom.sims.operations.scratch_run import joined_channel, round_loop
from fedloom.sims.report.tables import Table

SITES, SAMPLES, WIDTHS, INPUTS, CLASSES = 3, 60, [400, 200, 100], 64, 10
ROUNDS, TURNS = 6, 2
STOCK, BOTH, OURS = "stock FedAvg, Flower's nodes", "stock FedAvg, the same nodes", "fedloom"
MOST = 1.0  # times the stock app's time
LONGEST = 600.0  # seconds of a stock run
APP = {
    "project": {"name": "fedloom-stock", "version": "1.0.0", "description": "", "license": "Apache-2.0"},
    "tool": {"flwr": {"app": {
        "publisher": "fedloom",
        "components": {f"{half}app": f"fedloom.sims.benchmarks.federation_stock:{half}" for half in ("server", "client")},
        "config": {"job": ""},
    }}},
}  # fmt: skip


def bench(quick: bool = False) -> tuple[Table, list[dict[str, Any]]]:
    """Both apps in turn, each in runs of its own, then the stock app over nodes that start a program for each message, as
    Flower's own do. The first round of a run does not count."""
    seconds: dict[str, list[float]] = {STOCK: [], BOTH: [], OURS: []}
    with tempfile.TemporaryDirectory(prefix="fedloom-bench-") as temporary:
        root = Path(temporary)
        config, folder = configured(root), root / "federation"
        write_data(config, root)
        sites = [{"name": site.name, "domain": f"npz:{root / site.name}.npz", "apps": "any"} for site in config.roster]
        write_plan(Plan(port=free_port(), sites=sites), folder)
        try:
            local.up(folder, SITES, tls=True)
            for turn in range(1 if quick else TURNS):
                seconds[BOTH] += stock(config, folder, root / f"both-{turn}")
                seconds[OURS] += ours(config, root / f"ours-{turn}")
            cool(folder)
            local.up(folder, SITES, tls=True)
            seconds[STOCK] += stock(config, folder, root / "stock")
        finally:
            local.down(folder)
    return table(seconds), [{"app": app, "seconds": each} for app, each in seconds.items()]


def cool(folder: Path) -> None:
    """Stop the nodes; from now on they start a program for each message."""
    for name in sites_of(folder):
        local.stop(folder / name)
        path = folder / name / sheets.SITE
        sheets.write(path, replace(sheets.read(sheets.SiteSheet, path), warm=False))


def configured(root: Path) -> Config:
    """FedAvg of three sites on a network of linear layers; nothing is evaluated."""
    entries = ", ".join([f"{{domain: digits, samples: {SAMPLES}}}"] * SITES)
    fixed = [f"sites=[{entries}]", f"network={{name: mlp, widths: {WIDTHS}}}", "objective.mode=fedavg", "baselines=[]"]
    small = ["data.size=8", "data.validation=0", f"data.classes={CLASSES}", "training.epochs=1", "training.batch=32"]
    place = ["engine.name=flower", f"engine.address={root / 'federation'}", f"run.root={root}", "run.name=bench"]
    return load("digits", [*fixed, *small, *place, f"rounds={2 * ROUNDS}", "evaluation.every=1000000"])


def write_data(config: Config, root: Path) -> None:
    """The sites' images as files that both apps read."""
    for site in config.roster:
        images = site_images(config, site)
        x, y = images.x[:, 0].numpy(), images.y.numpy()
        np.savez(root / f"{site.name}.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])


def ours(config: Config, folder: Path) -> list[float]:
    """Seconds of rounds of this project's loop: asking, checking, adding up, committing."""
    with open_engine(config) as grid:
        loop = round_loop(config, folder.name, joined_channel(grid, config, config.federation.join_timeout), folder)
        records = [one_round(loop, round) for round in range(1, ROUNDS + 1)]
        loop.state.ledger.close()
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
    ratios = [statistics.median(seconds[OURS]) / statistics.median(seconds[other]) for other in (STOCK, BOTH)]
    told = f"{ratios[0]:.2f} times the stock app's over Flower's nodes, {ratios[1]:.2f} over the same ones"
    note = f"{SITES} sites of {SAMPLES} images on this machine, TLS and node keys: {told}; bar: at most {MOST:g}."
    return Table("A round of a real federation, seconds", ["app", "median", "range", "rounds"], lines, note)
