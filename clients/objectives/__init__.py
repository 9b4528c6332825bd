"""The sites' halves of methods: one file per method, found by name. All that a new one needs can be imported from here."""

from fedloom.clients.data import Images, to_float
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Objective, Session, Task, objective_of
from fedloom.clients.objectives.components import AUXILIARY, Auxiliary, Components
from fedloom.clients.objectives.depthfl import DepthFL
from fedloom.clients.objectives.ditto import Ditto
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.objectives.fednova import FedNova
from fedloom.clients.objectives.fedproto import FedProto
from fedloom.clients.objectives.fedprox import FedProx
from fedloom.clients.objectives.heterofl import HeteroFL
from fedloom.clients.objectives.heterogeneous import Heterogeneous
from fedloom.clients.objectives.layer_selection import BASE_LEARNERS, BaseLearner, LayerSelection
from fedloom.clients.objectives.local import Local
from fedloom.clients.objectives.plain import PlainSession, state_of
from fedloom.clients.objectives.scaffold import Scaffold
from fedloom.clients.objectives.sum_aggregation import SumAggregation
from fedloom.clients.protocol.messages import MEAN, MODEL, ROUND, SITE, TRAIN
from fedloom.conf.typed import option
from fedloom.fusion.exact import State

__all__ = [
    "AUXILIARY",
    "BASE_LEARNERS",
    "MEAN",
    "MODEL",
    "OBJECTIVES",
    "ROUND",
    "SITE",
    "TRAIN",
    "Answer",
    "Auxiliary",
    "BaseLearner",
    "Components",
    "DepthFL",
    "Ditto",
    "FedAvg",
    "FedNova",
    "FedProto",
    "FedProx",
    "HeteroFL",
    "Heterogeneous",
    "Images",
    "LayerSelection",
    "Local",
    "Objective",
    "PlainSession",
    "Scaffold",
    "Session",
    "State",
    "SumAggregation",
    "Task",
    "objective_of",
    "option",
    "state_of",
    "to_float",
]
