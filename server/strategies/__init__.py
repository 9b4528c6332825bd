"""The server's halves of methods: one file per method, found by name. All that a new one needs can be imported from here."""

from fedloom.clients.networks import Model
from fedloom.clients.protocol.messages import MEAN, MODEL, ROUND, SITE, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE, SAMPLES
from fedloom.fusion.exact import State
from fedloom.server.ledger.declared import PerClientSlot, Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec
from fedloom.server.rounds.schedules import OneByOne, Participation, Sampling, Schedule
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.arithmetic import ArithmeticStrategy
from fedloom.server.strategies.averaging import FedAvg, FedProx
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, slots_of, strategy_of
from fedloom.server.strategies.cla_ot import ClaOt
from fedloom.server.strategies.components import HeadTransfer
from fedloom.server.strategies.depthfl import DepthFL
from fedloom.server.strategies.ditto import Ditto
from fedloom.server.strategies.exclusive import Alone, Exclusive
from fedloom.server.strategies.feddf import FedDF
from fedloom.server.strategies.fednova import FedNova
from fedloom.server.strategies.fedproto import FedProto
from fedloom.server.strategies.fedrolex import FedRolex
from fedloom.server.strategies.flower import FlowerStrategy
from fedloom.server.strategies.heterofl import HeteroFL
from fedloom.server.strategies.inco import InCo
from fedloom.server.strategies.layer_selection import LayerSelectionStrategy
from fedloom.server.strategies.scaffold import Scaffold
from fedloom.server.strategies.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedloom.server.strategies.sum_aggregation import SumAggregationStrategy

__all__ = [
    "MEAN",
    "MODEL",
    "ONCE",
    "ROUND",
    "SAMPLES",
    "SITE",
    "STRATEGIES",
    "TRAIN",
    "Alone",
    "ArithmeticStrategy",
    "ClaOt",
    "ClientUpdate",
    "DepthFL",
    "Ditto",
    "Exclusive",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDF",
    "FedNova",
    "FedProto",
    "FedProx",
    "FedRolex",
    "FedYogi",
    "FlowerStrategy",
    "HeadTransfer",
    "HeteroFL",
    "InCo",
    "LayerSelectionStrategy",
    "Model",
    "Models",
    "OneByOne",
    "Participation",
    "PerClientSlot",
    "RecordSpec",
    "ResidualInfluence",
    "RoundContext",
    "Sampling",
    "Scaffold",
    "Schedule",
    "Slot",
    "State",
    "Strategy",
    "Sum",
    "SumAggregationStrategy",
    "View",
    "slots_of",
    "strategy_of",
]
