"""The clients' halves of methods: one file per method. Import everything that a new one needs from here."""

from fedloom.clients.data import Examples, to_float
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Experiment, Objective, Session, Task, objective_of, resolve
from fedloom.clients.objectives.plain import PlainSession, state_of
from fedloom.clients.protocol.messages import MEAN, MODEL, ROUND, SITE, TRAIN
from fedloom.conf.renamed import missing
from fedloom.conf.typed import option
from fedloom.fusion.state import State

__all__ = [
    "MEAN",
    "MODEL",
    "OBJECTIVES",
    "ROUND",
    "SITE",
    "TRAIN",
    "Answer",
    "Examples",
    "Experiment",
    "Objective",
    "PlainSession",
    "Session",
    "State",
    "Task",
    "objective_of",
    "option",
    "resolve",
    "state_of",
    "to_float",
]


def __getattr__(name: str) -> object:
    raise missing(__name__, name)
