"""Layer selection (LASEM, Lee et al. 2021): sequences of tasks, and ten sites at once."""

from fedloom.sims.experiments.lasem.runs import SIZES, plan_of
from fedloom.sims.experiments.lasem.tables import TABLES
from fedloom.sims.experiments.study import Reproduction

reproduce = Reproduction(
    "Layer selection", "runs/lasem", SIZES, TABLES, "lasem", ("sequences", lambda preset, tables: SIZES[preset]), plan_of
)
