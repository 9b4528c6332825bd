"""`fedloom bench federation`: a round of a real federation on this machine, against the stock FedAvg app.

Both apps use the same SuperLink and nodes. Then the stock app runs over nodes that start a program for each message, as
Flower's own nodes do.
"""

import itertools
import json
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.clients.data import site_examples
from fedloom.conf import load
from fedloom.conf.errors import FailedError
from fedloom.conf.schema import Config
from fedloom.server.run.training_run import one_round
from fedloom.sims.benchmarks.measuring import flower_app, table
from fedloom.sims.engines import open_engine
from fedloom.sims.federation import local, sheets
from fedloom.sims.federation.plan import CONNECTION, SERVER, Plan, sites_of, write_plan
from fedloom.sims.federation.programs import BIN, environment, free_port
from fedloom.sims.operations.scratch_run import joined_channel, round_loop
from fedloom.sims.report.tables import Table

SITES, SAMPLES, WIDTHS, INPUTS, CLASSES = 3, 60, [400, 200, 100], 64, 10
ROUNDS, TURNS = 6, 2
STOCK, BOTH, OURS = "stock FedAvg, Flower's nodes", "stock FedAvg, the same nodes", "fedloom"
MAX_TIME_RATIO = 1.0  # times the stock app's time
STOCK_TIMEOUT = 600.0  # seconds of a stock run
COMPONENTS = {f"{half}app": f"fedloom.sims.benchmarks.federation_stock:{half}" for half in ("server", "client")}
COLUMNS = {"app": "{app}", "median": "{median:.2f}", "range": "{least:.2f} to {most:.2f}", "rounds": "{rounds}"}


def bench(quick: bool = False) -> tuple[Table, list[dict[str, Any]]]:
    """Measure both apps in turn, then the stock app on nodes like Flower's. The first round of each run does not count."""
    seconds: dict[str, list[float]] = {STOCK: [], BOTH: [], OURS: []}
    with tempfile.TemporaryDirectory(prefix="fedloom-bench-") as temporary:
        root = Path(temporary)
        config, folder = _config(root), root / "federation"
        _write_data(config, root)
        sites = [{"name": site.name, "domain": f"npz:{root / site.name}.npz", "apps": "any"} for site in config.roster]
        write_plan(Plan(port=free_port(), sites=sites), folder)
        try:
            local.up(folder, SITES, tls=True)
            for turn in range(1 if quick else TURNS):
                seconds[BOTH] += _stock(config, folder, root / f"both-{turn}")
                seconds[OURS] += _ours(config, root / f"ours-{turn}")
            _cool(folder)
            local.up(folder, SITES, tls=True)
            seconds[STOCK] += _stock(config, folder, root / "stock")
        finally:
            local.down(folder)
    lines = [{"app": app, "median": statistics.median(taken), "least": min(taken), "most": max(taken), "rounds": len(taken)}
             for app, taken in seconds.items()]  # fmt: skip
    stock, both, ours = (line["median"] for line in lines)
    note = (
        f"{SITES} sites of {SAMPLES} images on this machine, TLS and node keys: {ours / stock:.2f} times the stock app's "
        f"time over Flower's nodes, {ours / both:.2f} times over the same nodes. Bar: at most {MAX_TIME_RATIO:g}."
    )
    rows = [{"app": app, "seconds": taken} for app, taken in seconds.items()]
    return table("A round of a real federation, seconds", COLUMNS, lines, note), rows


def _cool(folder: Path) -> None:
    """Stop the nodes and change their sheets: from the next start, they start a program for each message."""
    for name in sites_of(folder):
        local.stop(folder / name)
        path = folder / name / sheets.SITE
        sheets.write(path, replace(sheets.read(sheets.SiteSheet, path), warm=False))


def _config(root: Path) -> Config:
    """FedAvg of three sites on a network of linear layers; nothing is evaluated."""
    entries = ", ".join([f"{{domain: digits, samples: {SAMPLES}}}"] * SITES)
    fixed = [f"sites=[{entries}]", f"network={{name: mlp, widths: {WIDTHS}}}", "objective.mode=fedavg", "baselines=[]"]
    small = ["data.size=8", "data.validation=0", f"data.classes={CLASSES}", "training.epochs=1", "training.batch=32"]
    engine = ["engine.name=flower", f"engine.address={root / 'federation'}", f"run.root={root}", "run.name=bench"]
    return load("digits", [*fixed, *small, *engine, f"rounds={2 * ROUNDS}", "evaluation.every=1000000"])


def _write_data(config: Config, root: Path) -> None:
    """Write the sites' images as files that both apps read."""
    for site in config.roster:
        images = site_examples(config, site)
        x, y = images.x[:, 0].numpy(), images.y.numpy()
        np.savez(root / f"{site.name}.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])


def _ours(config: Config, folder: Path) -> list[float]:
    """Seconds of each round of this project's loop: asking, checking, summing, committing."""
    with open_engine(config) as grid:
        loop = round_loop(config, folder.name, joined_channel(grid, config, config.federation.join_timeout), folder)
        records = [one_round(loop, round) for round in range(1, ROUNDS + 1)]
        loop.state.ledger.close()
    if dropped := next((record["dropped"] for record in records if record["dropped"]), None):
        raise FailedError(f"a round lost a site, so the measurement does not count: {dropped}")
    return [record["seconds"] for record in records[1:]]


def _stock(config: Config, folder: Path, out: Path) -> list[float]:
    """Seconds of each round of the stock app, started by `flwr run`."""
    training = config.training
    job = {"data": str(out.parent), "widths": WIDTHS, "inputs": INPUTS, "classes": CLASSES, "rounds": ROUNDS, "sites": SITES,
           "ends": str(out / "ends.json"), "threads": config.engine.threads,
           **{key: getattr(training, key) for key in ("rate", "momentum", "epochs", "batch")}}  # fmt: skip
    app = flower_app(out / "app", COMPONENTS, json.dumps(job))
    home = {"FLWR_HOME": str((folder / SERVER / "flwr").resolve())}
    command = [str(BIN / "flwr"), "run", str(app), CONNECTION, "--stream"]
    done = subprocess.run(command, env=environment(home), cwd=app, capture_output=True, text=True, timeout=STOCK_TIMEOUT)
    ends = json.loads((out / "ends.json").read_text(encoding="utf-8")) if (out / "ends.json").exists() else []
    if len(ends) <= ROUNDS:
        raise FailedError(f"the stock app finished {len(ends)} of {ROUNDS + 1} rounds: {(done.stdout + done.stderr)[-500:]}")
    return [later - before for before, later in itertools.pairwise(ends)][1:]
