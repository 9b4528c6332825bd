"""Compatible components (Gygli et al. 2021): which heads can be exchanged, and why."""

from collections.abc import Callable, Iterable, Sequence

from fedloom.sims.experiments.components import adaptation, analyses, details, faster, joint, one_head, rivals
from fedloom.sims.experiments.components.sizes import SIZES
from fedloom.sims.experiments.study import Reproduction, Study, any_override
from fedloom.sims.report.page import Part

TABLES: dict[str, Callable[[Study], list[Part]]] = {
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


def _tasks(preset: str, tables: Sequence[str]) -> Iterable[str]:
    return joint.PAIRS if tables == ["joint"] else SIZES[preset].tasks


reproduce = Reproduction(
    "Compatible components", "runs/components-tables", SIZES, TABLES, "components", ("tasks", _tasks), any_override
)
