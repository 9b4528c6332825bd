"""The papers' tables, measured again. Each module has a function `reproduce`."""

MODULES = {
    "aggregation": "sims.experiments.aggregation",
    "arithmetic": "sims.experiments.arithmetic",
    "cla": "sims.experiments.cla",
    "unlearning": "sims.experiments.unlearning",
}
