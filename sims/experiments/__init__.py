"""The papers' tables, measured again. Each module has a function `reproduce`."""

MODULES = {
    "aggregation": "sims.experiments.aggregation",
    "arithmetic": "sims.experiments.arithmetic",
    "cla": "sims.experiments.cla",
    "components": "sims.experiments.components",
    "different_depths": "sims.experiments.different_depths",
    "fusion": "sims.experiments.fusion",
    "lasem": "sims.experiments.lasem",
    "skill_transfer": "sims.experiments.skill_transfer",
    "strategies": "sims.experiments.strategies",
    "unlearning": "sims.experiments.unlearning",
}
