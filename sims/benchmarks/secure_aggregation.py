"""`fedloom bench secure_aggregation`: seconds of a masked and a plain round, and of a request. One thread."""

import contextlib
import statistics
import tempfile
import time
from typing import Any

from fedloom.clients.app import app
from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.server.rounds.listener import Silent
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.unlearning.requests import receive
from fedloom.sims.benchmarks.measuring import nbytes, table
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import training_run
from fedloom.sims.report.tables import Table

SITES, ROUNDS, BAR = 10, 6, 1.5
FIXED = [
    f"sites=[{{domain: digits, count: {SITES}, samples: 60}}]", "network.width=1.85", "objective.subset_probability=0",
    "baselines=[]", "engine.name=inline", "evaluation.every=1000", "training.epochs=1", "training.batch=20",
]  # fmt: skip
COLUMNS = {"sites": "{sites}", "state, MB": "{mb:.2f}", "plain round, s": "{plain_s:.2f}", "masked, s": "{masked_s:.2f}",
           "ratio": "{ratio:.2f}", "a request, s": "{forgetting_s:.2f}", "same bits": "{same_bits}",
           "verdict": "{met}"}  # fmt: skip
NOTE = (f"Medians of {ROUNDS} rounds of one epoch over 60 images at each site, inline engine. Bar: {BAR} times the plain "
        "round. A request: a round, measurements, the certificate.")  # fmt: skip


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Run plain and masked rounds of the same sites in turn, so that noise is the same; then a round that forgets a site."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = {name: stack.enter_context(training_run(_config(folder, name))) for name in ("plain", "masked")}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(1, ROUNDS + 2):
            for name, run in runs.items():
                taken = _seconds(run, number)
                seconds[name] += [taken] if number > 1 else []  # the first warms up
        same = runs["plain"].state.digest() == runs["masked"].state.digest()
        masked_run = runs["masked"]
        receive(masked_run.ledger, "bench", [masked_run.config.roster[0].name], "", {})
        forgetting = _seconds(masked_run, ROUNDS + 1)
        size = nbytes(masked_run.state.aggregate().state) / 1e6
    plain, masked = (statistics.median(seconds[name]) for name in runs)
    row = {"sites": SITES, "mb": size, "plain_s": plain, "masked_s": masked, "ratio": masked / plain,
           "forgetting_s": forgetting, "same_bits": same, "met": masked / plain <= BAR}  # fmt: skip
    return table("Secure aggregation", COLUMNS, [row], NOTE), [row]


def _config(folder: str, name: str) -> Config:
    masks = f"federation.secure_aggregation={str(name == 'masked').lower()}"
    return load("digits", [*FIXED, masks, f"run.root={folder}", f"run.name={name}"])


def _seconds(run: TrainingRun, rounds: int) -> float:
    """Seconds of all rounds to number `rounds` that are not done yet, and of pending requests."""
    channel = run.joined(InlineGrid(SITES, store_folder(run.config), app))
    begin = time.perf_counter()
    run.train(channel, Silent(), rounds=rounds)
    return time.perf_counter() - begin
