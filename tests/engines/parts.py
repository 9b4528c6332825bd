"""Parts of the tests of engines: a small run and what comes out of it."""

from pathlib import Path

from clients.states import read_state
from conf import load
from fusion.exact import digest
from server.experiment import run_experiment
from server.listener import LogListener
from sims.engines import open_engine

SMALL = ["rounds=2", "sites.0.samples=120", "sites.1.samples=100", "data.size=8", "baselines=[]"]
SITES = "sites=[{domain: digits, samples: 60}, {domain: digits, rotation: 90, samples: 90}, {domain: digits, samples: 30}]"


def final_states(folder: Path, name: str, *engine: str) -> dict[str, str]:
    """Digests of all final states of a small run on an engine, and of its exact sum."""
    config = load(
        "digits", [*SMALL, SITES, *engine, f"run.root={folder}", f"run.name={name}", "objective.subset_probability=0.5"]
    )
    with open_engine(config) as grid:
        summary = run_experiment(grid, config, LogListener())
    files = sorted((folder / name / "states").glob("*.safetensors"))
    return {"sum": summary["digest"]["sum"], **{file.stem: digest(read_state(file)) for file in files}}
