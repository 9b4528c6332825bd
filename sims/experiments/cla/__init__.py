"""CLA+OT measured again: networks of unequal depth fused, transferred, distilled, fine-tuned."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fedloom.conf import UserError
from fedloom.conf.errors import unknown
from fedloom.sims.experiments import skill_transfer
from fedloom.sims.experiments.cla import distilling, mlps, sizing, starts
from fedloom.sims.experiments.cla.sizes import SIZES
from fedloom.sims.experiments.cla.study import ClaStudy
from fedloom.sims.experiments.dot_plot import draw
from fedloom.sims.experiments.papers import source_of
from fedloom.sims.experiments.table_files import folder_of, write
from fedloom.sims.report.page import Part, Picture

FOLDER = Path("runs/cla")


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Measure the tables with every seed (networks and results on disk are taken as they are) and write them.

    `overrides`: tables=1,3,13 measures these alone. Returns the folder. Raises UserError for another preset or override.
    """
    if preset not in SIZES:
        raise unknown("preset", preset, SIZES)
    asked = chosen(overrides)
    torch.set_num_threads(1)
    study = ClaStudy(preset, folder_of(FOLDER, preset), quiet)
    parts: list[Part] = []
    for make in dict.fromkeys(TABLES[name] for name in asked):
        parts += make(study, seeds)
        write(study.folder, "CLA+OT, measured again", source_of("cla_ot"), parts)  # what there is so far
    return study.folder


def chosen(overrides: Sequence[str]) -> list[str]:
    """The tables that are asked for, all if none is. Raises UserError for another override or table."""
    names = list(TABLES)
    for word in overrides:
        key, _, text = word.partition("=")
        names = text.split(",")
        if key != "tables" or not set(names) <= set(TABLES):
            raise UserError(f"override '{word}': takes tables=NUMBER,NUMBER of {', '.join(TABLES)}")
    return names


def _starts(asked: starts.Starts, *more: starts.Starts) -> Callable[[ClaStudy, int], list[Part]]:
    """Tables of starts, and a picture of the first one."""

    def make(study: ClaStudy, seeds: int) -> list[Part]:
        parts: list[Part] = [table for more_starts in (asked, *more) for table in starts.tables(study, more_starts, seeds)]
        pairs = [pair for pair in asked.pairs if pair in study.size.pairs]
        rows = {pair: starts.drawn_rows(study, asked, pair, seeds) for pair in pairs}
        picture = draw(rows, ["at once", "fine-tuned"], study.folder / f"table-{asked.number.split()[0]}.png")
        return [*parts, Picture(picture, f"Table {asked.number}: {asked.title}")]

    return make


def _mlps(study: ClaStudy, seeds: int) -> list[Part]:
    results = [mlps.measured(study, seed) for seed in range(seeds)]
    return [mlps.nine(results), mlps.ten(results), *starts.tables(study, starts.TEN, seeds)]


def _skill(study: ClaStudy, seeds: int) -> list[Part]:
    return skill_transfer.parts(study, seeds)


_teachers, _one = _starts(starts.FOUR), _starts(starts.ONE)
TABLES: dict[str, Callable[[ClaStudy, int], list[Part]]] = {
    "1": _one,
    "2": _starts(*starts.TWO),
    "3": _starts(starts.THREE),
    "4": _teachers,
    "5": lambda study, seeds: [distilling.table(study, seeds)],
    "9": _mlps,
    "10": _mlps,
    "11": _starts(starts.ELEVEN),
    "12": _starts(starts.TWELVE),
    "13": _skill,
    "18": _teachers,
    "20": lambda study, seeds: [sizing.table(study)],
    "21": lambda study, seeds: [distilling.epochs_table(study)],
}
