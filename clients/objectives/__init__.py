"""The sites' halves of methods: one file per method, found by name. All that a new one needs can be imported from here."""

from clients.data import Images, to_float
from clients.messages import MEAN, MODEL, ROUND, SITE, TRAIN
from clients.objectives.base import OBJECTIVES, Answer, Objective, Session, Task, objective_of
from clients.objectives.components import AUXILIARY, Auxiliary, Components
from clients.objectives.depthfl import DepthFL
from clients.objectives.ditto import Ditto
from clients.objectives.fedavg import FedAvg
from clients.objectives.fednova import FedNova
from clients.objectives.fedproto import FedProto
from clients.objectives.fedprox import FedProx
from clients.objectives.heterofl import HeteroFL
from clients.objectives.heterogeneous import Heterogeneous
from clients.objectives.layer_selection import BASE_LEARNERS, BaseLearner, LayerSelection
from clients.objectives.local import Local
from clients.objectives.plain import PlainSession, state_of
from clients.objectives.scaffold import Scaffold
from clients.objectives.sum_aggregation import SumAggregation
from conf.typed import value
from fusion.exact import State

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
    "state_of",
    "to_float",
    "value",
]
