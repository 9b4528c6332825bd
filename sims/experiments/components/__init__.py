"""Compatible components (Gygli et al. 2021): which heads can be exchanged, and why."""

from collections.abc import Callable, Iterable, Sequence

from fedloom.sims.experiments.components import adaptation, faster, joint, one_head, tables
from fedloom.sims.experiments.components.sizes import SIZES
from fedloom.sims.experiments.study import Reproduction, Study, any_override
from fedloom.sims.report.page import Part

TABLES: dict[str, Callable[[Study], list[Part]]] = {
    "figure2": tables.figure2,
    "joint": joint.joint,
    "schemes": tables.schemes,
    "steps": tables.steps,
    "figure5": tables.figure5,
    "figure6": tables.figure6,
    "figure8": tables.figure8,
    "figure9": tables.figure9,
    "rivals": tables.rivals,
    "table1": adaptation.table1,
    "figure3": one_head.figure3,
    "figure4": faster.figure4,
}


def _tasks(preset: str, names: Sequence[str]) -> Iterable[str]:
    return joint.PAIRS if names == ["joint"] else SIZES[preset].tasks


reproduce = Reproduction(
    "Compatible components", "runs/components-tables", SIZES, TABLES, "components", ("tasks", _tasks), any_override
)
