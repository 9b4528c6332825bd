"""The papers' tables, measured again. Each module has a function `reproduce`."""

MODULES = {
    "aggregation": "sims.experiments.aggregation",
    "cla": "sims.experiments.cla",
    "unlearning": "sims.experiments.unlearning",
}
