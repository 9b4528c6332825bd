"""Parts of the tests of engines: a small run and what comes out of it."""

import contextlib
from pathlib import Path

from fedloom.clients.storage.states import read_state
from fedloom.conf import load
from fedloom.fusion.state import digest
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine
from fedloom.sims.engines.adapter import LocalGrid

SMALL = ["rounds=2", "sites.0.samples=120", "sites.1.samples=100", "data.size=8", "baselines=[]"]
SITES = "sites=[{domain: digits, samples: 60}, {domain: digits, rotation: 90, samples: 90}, {domain: digits, samples: 30}]"


def final_states(folder: Path, name: str, *engine: str, grid: LocalGrid | None = None) -> dict[str, str]:
    """Digests of all final states of a small run on an engine, or on one that is there, and of its exact sums."""
    config = load(
        "digits", [*SMALL, SITES, *engine, f"run.root={folder}", f"run.name={name}", "objective.subset_probability=0.5"]
    )
    with contextlib.nullcontext(grid) if grid else open_engine(config) as opened:
        summary = run_experiment(opened, config, LogListener())
    files = sorted((folder / name / "states").glob("*.safetensors"))
    sums = {f"slot {name}": found for name, found in summary["digest"].items()}
    return {**sums, **{file.stem: digest(read_state(file)) for file in files}}
