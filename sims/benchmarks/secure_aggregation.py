"""What masks cost: seconds of a round under secure aggregation beside a plain one, and of a request. One thread."""

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
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import training_run
from fedloom.sims.report.tables import Table

SITES, ROUNDS, BAR = 10, 6, 1.5
FIXED = [
    f"sites=[{{domain: digits, count: {SITES}, samples: 60}}]", "network.width=1.85", "objective.subset_probability=0",
    "baselines=[]", "engine.name=inline", "evaluation.every=1000", "training.epochs=1", "training.batch=20",
]  # fmt: skip


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Plain and masked rounds of the same sites in turn, so that noise meets both alike; then one more that forgets."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ways = {name: stack.enter_context(training_run(configured(folder, name))) for name in ("plain", "masked")}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(1, ROUNDS + 2):
            for way, method in ways.items():
                taken = _seconds(method, number)
                seconds[way] += [taken] if number > 1 else []  # the first warms up
        same = ways["plain"].state.digest() == ways["masked"].state.digest()
        method = ways["masked"]
        receive(method.ledger, "bench", [method.config.roster[0].name], "", {})
        forgetting = _seconds(method, ROUNDS + 1)
        size = sum(tensor.nbytes for tensor in method.state.aggregate().state.values()) / 1e6
    plain, masked = (statistics.median(seconds[way]) for way in ways)
    row = {"sites": SITES, "mb": size, "plain_s": plain, "masked_s": masked, "ratio": masked / plain,
           "forgetting_s": forgetting, "same_bits": same, "met": masked / plain <= BAR}  # fmt: skip
    head = ["sites", "state, MB", "plain round, s", "masked, s", "ratio", "a request, s", "same bits", "verdict"]
    line = [str(SITES), f"{size:.2f}", f"{plain:.2f}", f"{masked:.2f}", f"{masked / plain:.2f}", f"{forgetting:.2f}",
            "yes" if same else "NO", "met" if row["met"] else "not met"]  # fmt: skip
    note = f"Medians of {ROUNDS} rounds of an epoch over 60 images a site, inline; bar: {BAR} times the plain round. "
    note += "A request: a round, measurements, the certificate."
    return Table("Secure aggregation", head, [line], note), [row]


def configured(folder: str, name: str) -> Config:
    """The run "plain" or "masked"."""
    masks = f"federation.secure_aggregation={str(name == 'masked').lower()}"
    return load("digits", [*FIXED, masks, f"run.root={folder}", f"run.name={name}"])


def _seconds(method: TrainingRun, rounds: int) -> float:
    """Of all rounds up to that number that are not done yet, and of what requests want."""
    federation = method.joined(InlineGrid(SITES, store_folder(method.config), app))
    begin = time.perf_counter()
    method.train(federation, Silent(), rounds=rounds)
    return time.perf_counter() - begin
