"""The server's halves of methods: one file per method, found by name. All that a new one needs can be imported from here."""

from clients.messages import MEAN, MODEL, ROUND, SITE, TRAIN
from clients.networks import Model
from clients.partial import ONCE, SAMPLES
from fusion.exact import State
from server.ledger.declared import Catalogue, Slot, Sum
from server.rounds.expected import Expected, Reply
from server.rounds.run import Run
from server.rounds.schedules import OneByOne, Participation, Sampling, Schedule
from server.rounds.view import Models, View
from server.strategies.arithmetic import ArithmeticStrategy
from server.strategies.averaging import FedAvg, FedProx
from server.strategies.base import STRATEGIES, Residue, Strategy, slots_of, strategy_of
from server.strategies.cla_ot import ClaOt
from server.strategies.components import HeadTransfer
from server.strategies.depthfl import DepthFL
from server.strategies.ditto import Ditto
from server.strategies.exclusive import Alone, Exclusive
from server.strategies.feddf import FedDF
from server.strategies.fednova import FedNova
from server.strategies.fedproto import FedProto
from server.strategies.fedrolex import FedRolex
from server.strategies.flower import FlowerStrategy
from server.strategies.heterofl import HeteroFL
from server.strategies.inco import InCo
from server.strategies.layer_selection import LayerSelectionStrategy
from server.strategies.scaffold import Scaffold
from server.strategies.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from server.strategies.sum_aggregation import SumAggregationStrategy

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
    "Catalogue",
    "ClaOt",
    "DepthFL",
    "Ditto",
    "Exclusive",
    "Expected",
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
    "Reply",
    "Residue",
    "Run",
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
