"""The server's half of each method, one file per method, looked up by name. A new strategy imports all it needs here."""

from fedloom.clients.networks import Model
from fedloom.clients.protocol.messages import MEAN, MODEL, ROUND, SITE, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE, SAMPLES
from fedloom.conf.renamed import missing
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import PerClientSlot, Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec
from fedloom.server.rounds.schedules import OneByOne, Participation, Sampling, Schedule
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, slots_of, strategy_of

__all__ = [
    "MEAN",
    "MODEL",
    "ONCE",
    "ROUND",
    "SAMPLES",
    "SITE",
    "STRATEGIES",
    "TRAIN",
    "ClientUpdate",
    "Model",
    "Models",
    "OneByOne",
    "Participation",
    "PerClientSlot",
    "RecordSpec",
    "ResidualInfluence",
    "RoundContext",
    "Sampling",
    "Schedule",
    "Slot",
    "State",
    "Strategy",
    "Sum",
    "View",
    "slots_of",
    "strategy_of",
]


def __getattr__(name: str) -> object:
    raise missing(__name__, name)
