"""CLA+OT: networks of different depth fused, transferred, distilled and fine-tuned."""

from collections.abc import Callable, Sequence

from fedloom.sims.experiments import skill_transfer
from fedloom.sims.experiments.cla import distilling, mlps, sizing, starts
from fedloom.sims.experiments.cla.sizes import SIZES
from fedloom.sims.experiments.study import Reproduction, Study
from fedloom.sims.report.page import Part

_teachers = starts.maker(starts.FOUR)
TABLES: dict[str, Callable[[Study], Sequence[Part]]] = {
    "1": starts.maker(starts.ONE),
    "2": starts.maker(*starts.TWO),
    "3": starts.maker(starts.THREE),
    "4": _teachers,
    "5": distilling.table,
    "9": mlps.tables,
    "10": mlps.tables,
    "11": starts.maker(starts.ELEVEN),
    "12": starts.maker(starts.TWELVE),
    "13": skill_transfer.parts,
    "18": _teachers,
    "20": sizing.table,
    "21": distilling.epochs_table,
}
reproduce = Reproduction("CLA+OT, measured again", "runs/cla", SIZES, TABLES, "cla_ot")
