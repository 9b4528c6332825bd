"""Layer selection (LASEM, Lee et al. 2021) measured again: sequences of tasks, and ten sites at once."""

from collections.abc import Sequence
from pathlib import Path

import torch

from fedloom.conf.errors import UserError, unknown
from fedloom.sims.experiments.lasem.study import SIZES, LasemStudy
from fedloom.sims.experiments.lasem.tables import TABLES
from fedloom.sims.experiments.papers import source_of
from fedloom.sims.experiments.table_files import chosen, folder_of, write
from fedloom.sims.report.page import Part

FOLDER = Path("runs/lasem")
MOST = 1e6
KINDS = {int: "a whole number", float: "a number"}
PLAN = {"epochs": int, "rate": float}  # of each task, which overrides may change


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Measure the tables with every seed (what is on disk is taken as it is) and write them.

    `overrides`: tables=figure1,table3 and sequences=digits choose some; epochs=20 and rate=0.01 are for every task. Returns
    the folder. Raises UserError for another preset, table, sequence or override.
    """
    if preset not in SIZES:
        raise unknown("preset", preset, SIZES)
    tables, rest = chosen("tables", overrides, TABLES)
    sequences, rest = chosen("sequences", rest, SIZES[preset])
    folder = folder_of(FOLDER, preset)
    torch.set_num_threads(1)
    study, parts = LasemStudy(preset, folder, quiet, sequences, _plan(rest)), list[Part]()
    for name in tables or TABLES:
        parts += TABLES[name](study, seeds)
        write(folder, "Layer selection", source_of("lasem"), parts)  # what there is so far
    return folder


def _plan(overrides: Sequence[str]) -> dict[str, float]:
    plan = {}
    for word in overrides:
        key, _, value = word.partition("=")
        if key not in PLAN:
            raise unknown("override", key, [*PLAN, "tables", "sequences"])
        try:
            plan[key] = PLAN[key](value)
        except ValueError:
            raise UserError(f"{key}: got '{value}', takes {KINDS[PLAN[key]]}") from None
        if not 0 < plan[key] < MOST:
            raise UserError(f"{key}: got {value}, takes {KINDS[PLAN[key]]} above 0")
    return plan
