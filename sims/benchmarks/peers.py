"""`fedloom bench peers`: a round of FedAvg in Fedloom, plain loops, Flower and pfl-research, in turn on this machine."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.machine import cores
from fedloom.sims.benchmarks import peer_jobs
from fedloom.sims.benchmarks.measuring import table
from fedloom.sims.benchmarks.peer_jobs import ASKED, IMAGES, PEERS, SITES, SIZES, WORKERS
from fedloom.sims.report.tables import Table

TURNS, ROUNDS, LARGE_ROUNDS, QUICK = 5, 23, 8, (1, 8)
LOOPS = {1: "plain loop, one process", 2: "plain loop, two processes"}
COLUMNS = {"peer": "{peer}", "ms a round": "{ms:.0f}", "fastest": "{fastest:.0f}", "slowest": "{slowest:.0f}",
           "of the loop in one process": "{share:.2f}", "note": "{note}"}  # fmt: skip
LIMIT = 1200  # seconds of a peer's process
TORCHRUN = "pfl-research, two processes"
NEEDS = {"pfl-research, one process": "pfl", TORCHRUN: "pfl"}  # the package
PYTHON = "FEDLOOM_PEERS_PYTHON"  # the Python of an environment that has the other packages


def bench(quick: bool = False, large: bool = False) -> tuple[Table, list[dict[str, Any]]]:
    """Measure each peer in fresh processes, in turn, so that other load on the machine meets all of them.

    `quick`: one turn of few rounds. `large`: a network of 2.8 MB instead of 0.3, and fewer rounds.
    Raises UserError for a Python in FEDLOOM_PEERS_PYTHON that is missing.
    """
    turns, rounds = QUICK if quick else (TURNS, LARGE_ROUNDS if large else ROUNDS)
    size = "large" if large else "small"
    python = os.environ.get(PYTHON, "")
    if python and not Path(python).is_file():
        raise UserError(f"{PYTHON}: {python} is not a file; name the Python of an environment that has pfl")
    taken: dict[str, list[float]] = {peer: [] for peer in PEERS}
    notes = dict.fromkeys(PEERS, "")
    for _ in range(turns):
        for peer in PEERS:
            if notes[peer]:
                continue
            try:
                taken[peer].append(1e3 * statistics.median(measure(peer, size, rounds, python if peer in NEEDS else "")))
            except RuntimeError as error:
                notes[peer] = f"`pip install {NEEDS[peer]}`" if peer in NEEDS and NEEDS[peer] in str(error) else str(error)
    loop = statistics.median(taken[LOOPS[1]]) if taken[LOOPS[1]] else None
    rows = [_row(peer, taken[peer], loop, notes[peer]) for peer in PEERS]
    parameters = sum(weight.numel() for weight in SIZES[size].network().parameters())
    note = (
        f"{ASKED} of {SITES} sites train {parameters:,} weights on {IMAGES} images for an epoch, in batches of 32; "
        f"{cores()} cores. Median of {turns} turns of {rounds - 3} rounds. For pfl-research, `pip install pfl` into another "
        f"environment, and set {PYTHON} to its Python."
    )
    return table("A round of FedAvg", COLUMNS, rows, note), rows


def _row(peer: str, ms: list[float], loop: float | None, note: str) -> dict[str, Any]:
    if not ms:
        return {"peer": peer, "ms": None, "fastest": None, "slowest": None, "share": None, "note": note}
    middle = statistics.median(ms)
    return {"peer": peer, "ms": middle, "fastest": min(ms), "slowest": max(ms), "share": middle / loop if loop else None,
            "note": note}  # fmt: skip


def measure(peer: str, size: str, rounds: int, python: str = "") -> list[float]:
    """Run a peer's job in a new process, and return the seconds of each round but the first three.

    `size`: a key of SIZES. `python`: the Python of an environment with the peer's package; "": this one.

    Raises:
        RuntimeError: The process failed; the message is its last line. Or it took more than LIMIT seconds.
    """
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORKERS}"] if peer == TORCHRUN else []
    command = [python or sys.executable, "-P", *several, peer_jobs.__file__, peer, size, str(rounds)]
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
    ):  # pipes stay open in processes left over
        done = subprocess.Popen(
            command, stdout=out, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
        )
        try:
            done.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            raise RuntimeError(f"not finished in {LIMIT} s") from None
        out.seek(0)
        errors.seek(0)
        lines, said = [line for line in out if line.startswith("[")], errors.read().strip()
    if done.returncode or not lines:
        raise RuntimeError((said or "no message").splitlines()[-1])
    return json.loads(lines[-1])[3:]
