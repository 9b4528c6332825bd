"""The commands `fedloom reproduce NAME`: tables and figures of papers, measured again."""

MODULES = {
    "aggregation": "fedloom.sims.experiments.aggregation",
    "arithmetic": "fedloom.sims.experiments.arithmetic",
    "cla": "fedloom.sims.experiments.cla",
    "components": "fedloom.sims.experiments.components",
    "different_depths": "fedloom.sims.experiments.different_depths",
    "fusion": "fedloom.sims.experiments.fusion",
    "lasem": "fedloom.sims.experiments.lasem",
    "skill_transfer": "fedloom.sims.experiments.skill_transfer",
    "strategies": "fedloom.sims.experiments.strategies",
    "unlearning": "fedloom.sims.experiments.unlearning",
}
