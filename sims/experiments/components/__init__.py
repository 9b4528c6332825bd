"""Compatible components (Gygli et al. 2021) measured again: which heads can be exchanged, and what that depends on."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fedloom.conf.errors import unknown
from fedloom.sims.experiments.components import adaptation, analyses, details, faster, joint, one_head, rivals
from fedloom.sims.experiments.components.sizes import SIZES
from fedloom.sims.experiments.components.study import ComponentsStudy
from fedloom.sims.experiments.papers import source_of
from fedloom.sims.experiments.table_files import chosen, folder_of, write
from fedloom.sims.report.page import Part

FOLDER = Path("runs/components-tables")
TABLES: dict[str, Callable[[ComponentsStudy, int], list[Part]]] = {
    "figure2": analyses.figure2,
    "joint": joint.joint,
    "schemes": analyses.schemes,
    "steps": analyses.steps,
    "figure5": details.figure5,
    "figure6": details.figure6,
    "figure8": details.figure8,
    "figure9": details.figure9,
    "rivals": rivals.rivals,
    "table1": adaptation.table1,
    "figure3": one_head.figure3,
    "figure4": faster.figure4,
}


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Measure the tables with every seed (what is on disk is taken as it is) and write them.

    `overrides`: tables=figure2,steps and tasks=usps_mnistm choose some; others are for every run. Returns the folder. Raises
    UserError for another preset, table or task, and for bad overrides.
    """
    if preset not in SIZES:
        raise unknown("preset", preset, SIZES)
    folder = folder_of(FOLDER, preset)
    tables, rest = chosen("tables", overrides, TABLES)
    tasks, rest = chosen("tasks", rest, joint.PAIRS if tables == ["joint"] else SIZES[preset].tasks)
    torch.set_num_threads(1)
    study, parts = ComponentsStudy(preset, folder, quiet, tasks, rest), list[Part]()
    for name in tables or TABLES:
        parts += TABLES[name](study, seeds)
        write(folder, "Compatible components", source_of("components"), parts)  # what there is so far
    return folder
