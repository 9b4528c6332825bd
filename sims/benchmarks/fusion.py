"""Time and memory of alignment and fusion at full width, one thread, beside one batched forward pass of both networks."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.clients.networks import initialise, parse_name
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.cla_ot import transport
from fedloom.fusion.pipeline import fuse
from fedloom.sims.benchmarks import fusion_server
from fedloom.sims.report.tables import Table

PAIRS = {
    "VGG13 (double) + VGG11 (half)": ("vgg13:norm=none,width=2", "vgg11:norm=none,width=0.5"),
    "ResNet34 + ResNet18": ("resnet34:norm=none", "resnet18:norm=none"),
}
SAMPLES, SIZE = 200, 32
REPEATS = 3
MOST_RATIO, MOST_MEMORY = 2.5, 400.0
# Of the public code, measured once: seconds, MiB
PUBLIC = {"VGG13 (double) + VGG11 (half)": (27.5, 1.8 * 1024), "ResNet34 + ResNet18": (44.5, 3.8 * 1024)}


def bench() -> tuple[list[Table], list[dict[str, Any]]]:
    """Each pair, and each start of a federation, in a process of its own."""
    rows = [_alone("fedloom.sims.benchmarks.fusion", name) for name in PAIRS]
    parts = Table("Parts, seconds", ["part", *PAIRS], [[part, *(f"{row['parts'].get(part, 0.0):.2f}" for row in rows)]
                                                       for part in rows[0]["parts"]])  # fmt: skip
    head = [
        "pair",
        "forward passes, s",
        "EMD, s",
        "all of fuse, s",
        "ratio",
        "memory, MiB",
        "networks made, MiB",
        "public code",
        "verdict",
    ]
    lines = [_line(row) for row in rows]
    note = (
        f"{SAMPLES} samples of {SIZE}x{SIZE}, one thread, random weights. Ratio: (all of fuse - EMD) / forward passes, the "
        f"median of {REPEATS} runs; bars: at most {MOST_RATIO}, and {MOST_MEMORY:.0f} MiB at the peak beyond all weights."
    )
    rounds = [_alone("fedloom.sims.benchmarks.fusion_server", start) for start in fusion_server.STARTS]
    return [Table("Fusion", head, lines, note), parts, fusion_server.table(rounds)], [*rows, *rounds]


def _alone(module: str, word: str) -> dict[str, Any]:
    """What a module prints last, in a process of its own."""
    done = subprocess.run([sys.executable, "-P", "-m", module, word], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _line(row: dict[str, Any]) -> list[str]:
    seconds, memory = PUBLIC[row["pair"]]
    met = row["ratio"] <= MOST_RATIO and row["extra_mb"] <= MOST_MEMORY
    return [row["pair"], f"{row['forward_s']:.2f}", f"{row['emd_s']:.2f}", f"{row['fuse_s']:.2f}", f"{row['ratio']:.2f}",
            f"{row['extra_mb']:.0f}", f"{row['made_mb']:.0f}",
            f"{seconds:g} s, {memory:.0f} MiB", "met" if met else "not met"]  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """One pair, in this process."""
    torch.set_num_threads(1)
    networks = []
    for text in PAIRS[name]:
        network = parse_name(text, 3, SIZE, 10).build().eval()
        initialise(network, torch_generator(0, text))
        for parameter in network.parameters():  # branches that start at zero would have nothing to align
            torch.nn.init.kaiming_normal_(parameter) if parameter.ndim > 1 and not bool(parameter.any()) else None
        networks.append(network)
    probe = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=torch_generator(0, "probe"))
    before = _resident()
    spent = _timed_solver()
    fused = fuse(networks, into=1, depth=0, probe=probe)
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    made = _weights([fused.network, *fused.balanced, *fused.aligned], networks)
    runs = []
    for _ in range(REPEATS):
        spent.clear()
        forward = _forward(networks, probe)
        parts = fuse(networks, into=1, depth=0, probe=probe).seconds
        runs.append(((sum(parts.values()) - sum(spent)) / forward, forward, sum(spent), dict(parts)))
    ratio, forward, emd, parts = sorted(runs, key=lambda run: run[0])[REPEATS // 2]
    return {"pair": name, "forward_s": forward, "emd_s": emd, "fuse_s": sum(parts.values()), "parts": parts,
            "ratio": ratio, "extra_mb": extra - made, "made_mb": made}  # fmt: skip


def _weights(made: Sequence[nn.Module], given: Sequence[nn.Module]) -> float:
    """MiB of the weights that were not there before."""
    sizes, before = ({t.data_ptr(): t.nbytes for network in group for t in network.parameters()} for group in (made, given))
    return sum(size for place, size in sizes.items() if place not in before) / 2**20


def _timed_solver() -> list[float]:
    """Seconds of each EMD from now on."""
    spent: list[float] = []
    exact = transport.SOLVERS["exact"]

    def timed(*given: Any) -> np.ndarray:
        begin = time.perf_counter()
        plan = exact(*given)
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


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
