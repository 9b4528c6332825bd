"""`fedloom bench fusion`: alignment and fusion at full width against forward passes, and the server's part of `cla_ot`.

One thread, random weights. The server's part is that of a round with ten sites of ResNet18 and ResNet34.
"""

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from fedloom.clients.data.form import Form
from fedloom.clients.networks import initialise, parse_name
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import resolve
from fedloom.conf import load
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.cla_ot import transport
from fedloom.fusion.pipeline import fuse
from fedloom.server.strategies.architectures import group_by_site
from fedloom.sims.benchmarks.measuring import MIB, fresh, peak_mib, table
from fedloom.sims.operations.scratch_run import training_run
from fedloom.sims.report.tables import Table

PAIRS = {
    "VGG13 (double) + VGG11 (half)": ("vgg13:norm=none,width=2", "vgg11:norm=none,width=0.5"),
    "ResNet34 + ResNet18": ("resnet34:norm=none", "resnet18:norm=none"),
}
SAMPLES, SIZE, REPEATS = 200, 32, 3
MOST_RATIO, MOST_MEMORY = 2.5, 400.0
PUBLIC = ("27.5 s, 1843 MiB", "44.5 s, 3891 MiB")  # of the public code for both pairs, measured once
COLUMNS = {"pair": "{pair}", "forward passes, s": "{forward_s:.2f}", "EMD, s": "{emd_s:.2f}",
           "all of fuse, s": "{fuse_s:.2f}", "ratio": "{ratio:.2f}", "memory, MiB": "{extra_mb:.0f}", 
           "networks made, MiB": "{made_mb:.0f}", "public code": "{public}", "verdict": "{met}"}  # fmt: skip
NOTE = (
    f"{SAMPLES} samples of {SIZE}x{SIZE}, one thread, random weights. Ratio: (all of fuse - EMD) / forward passes, median "
    f"of {REPEATS} runs. Bars: ratio at most {MOST_RATIO}; peak memory without weights at most {MOST_MEMORY:.0f} MiB."
)
SITES, SITE_SAMPLES = 10, 50
STARTS = ("shared", "own")
MOST_SECONDS, MOST_ROUND_MEMORY = 60.0, 1.5 * 1024
ROUND_COLUMNS = {"start": "{start}", "put, s": "{put:.1f}", "settle, s": "{settle:.1f}", "commit, s": "{commit:.1f}",
                 "all, s": "{all:.1f}", "memory, MiB": "{mib:.0f}", "verdict": "{met}"}  # fmt: skip
ROUND_NOTE = (
    f"{SITES} sites, {SAMPLES} probe samples of {SIZE}x{SIZE}, one thread, random weights. Settle makes the network "
    "that each architecture starts its next round with: a mean of networks in one basis, or (own, in round 1 only) a "
    f"fusion of all networks into each architecture. Bars: {MOST_SECONDS:.0f} s, {MOST_ROUND_MEMORY:.0f} MiB."
)


def bench() -> tuple[list[Table], list[dict[str, Any]]]:
    """Measure the fusion of each pair, and a server's round with each start, each in a fresh process."""
    rows = [fresh("fusion:measure", pair) for pair in PAIRS]
    parts = [{"part": part, **{row["pair"]: row["parts"].get(part, 0.0) for row in rows}} for part in rows[0]["parts"]]
    rounds = [fresh("fusion:round_of_server", start) for start in STARTS]
    lines = [{**row, "public": public, "met": row["ratio"] <= MOST_RATIO and row["extra_mb"] <= MOST_MEMORY}
             for row, public in zip(rows, PUBLIC, strict=True)]  # fmt: skip
    for row in rounds:
        row["all"] = row["put"] + row["settle"] + row["commit"]
        row["met"] = row["all"] <= MOST_SECONDS and row["mib"] <= MOST_ROUND_MEMORY
    tables = [
        table("Fusion", COLUMNS, lines, NOTE),
        table("Parts, seconds", {"part": "{part}", **{pair: f"{{{pair}:.2f}}" for pair in PAIRS}}, parts),
        table("The server's part of a round of cla_ot", ROUND_COLUMNS, rounds, ROUND_NOTE),
    ]
    return tables, [*rows, *rounds]


def measure(pair: str) -> dict[str, Any]:
    """Fuse a pair of networks in this process; return seconds and MiB."""
    torch.set_num_threads(1)
    networks = []
    for text in PAIRS[pair]:
        network = parse_name(text, Form.images(3, SIZE, 10)).build().eval()
        initialise(network, torch_generator(0, text))
        for parameter in network.parameters():  # branches that start at zero would have nothing to align
            torch.nn.init.kaiming_normal_(parameter) if parameter.ndim > 1 and not bool(parameter.any()) else None
        networks.append(network)
    probe = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=torch_generator(0, "probe"))
    before, spent = psutil.Process().memory_info().rss / MIB, _timed_solver()
    fused = fuse(networks, into=1, depth=0, probe=probe)
    extra = peak_mib() - before
    made = _new_weights([fused.network, *fused.balanced, *fused.aligned], networks)
    runs = []
    for _ in range(REPEATS):
        spent.clear()
        forward = _forward(networks, probe)
        parts = fuse(networks, into=1, depth=0, probe=probe).seconds
        runs.append(((sum(parts.values()) - sum(spent)) / forward, forward, sum(spent), dict(parts)))
    ratio, forward, emd, parts = sorted(runs, key=lambda run: run[0])[REPEATS // 2]
    return {"pair": pair, "forward_s": forward, "emd_s": emd, "fuse_s": sum(parts.values()), "parts": parts,
            "ratio": ratio, "extra_mb": extra - made, "made_mb": made}  # fmt: skip


def _new_weights(made: Sequence[nn.Module], inputs: Sequence[nn.Module]) -> float:
    """MiB of the weights that the inputs do not have."""
    sizes, before = ({t.data_ptr(): t.nbytes for network in group for t in network.parameters()} for group in (made, inputs))
    return sum(size for address, size in sizes.items() if address not in before) / MIB


def _timed_solver() -> list[float]:
    """Make the exact solver record its time, and return the list that receives the seconds of each call."""
    spent: list[float] = []
    exact = transport.SOLVERS["exact"]

    def timed(*arguments: Any) -> np.ndarray:
        begin = time.perf_counter()
        plan = exact(*arguments)
        spent.append(time.perf_counter() - begin)
        return plan

    transport.SOLVERS["exact"] = timed
    return spent


def _forward(networks: list[nn.Module], probe: torch.Tensor) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        for network in networks:
            network(probe)
    return time.perf_counter() - begin


def round_of_server(start: str) -> dict[str, Any]:
    """Measure the server's part of a round in this process: store all sites' networks, fuse them (`settle`), commit.

    `start`: strategy.start. Return the seconds of each part, and the increase of the peak memory in MiB.
    """
    torch.set_num_threads(1)
    networks = "[{name: resnet18, width: 1.0, norm: batch}, {name: resnet34, width: 1.0, norm: batch}]"
    with tempfile.TemporaryDirectory() as root:
        config = load("different_digits", [
            f"sites=[{{domain: digits, count: {SITES}, samples: {SITE_SAMPLES}, networks: {networks}}}]",
            "network={name: resnet34, width: 1.0, norm: batch}", "data={size: 32, grey: false}", "baselines=[]",
            f"strategy={{name: cla_ot, start: {start}, probe: {{samples: {SAMPLES}}}}}", f"run.root={root}",
            "engine.threads=1",
        ])  # fmt: skip
        with training_run(config) as method:
            before = peak_mib()
            run, groups = method.state.round_context(1), group_by_site(resolve(config))
            times = [time.perf_counter()]
            for site in config.roster:
                run.put(groups[site.name].name, site, initial_state(config, site.name, site), SITE_SAMPLES)
            times.append(time.perf_counter())
            method.state.strategy.recompute_derived(run)
            times.append(time.perf_counter())
            method.state.commit(1, {})
            times.append(time.perf_counter())
    parts = {name: times[number + 1] - times[number] for number, name in enumerate(("put", "settle", "commit"))}
    return {"start": start, **parts, "mib": peak_mib() - before}
