"""Averaging with an optimiser at the server, which uses the mean change of a round, x_t - mean, as a gradient.

Buffers (BatchNorm's statistics) are averaged, because an optimiser's step could make a variance negative.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.strategies.averaging import NETWORK, Averaging
from fedloom.server.strategies.base import STRATEGIES

MOMENTUM, SQUARES = "momentum", "squares"
MOST_DECAY = 0.999999  # of beta_1; with 1, the network never moves


@STRATEGIES.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(Averaging):
    """FedAvg with momentum at the server: v_t = momentum v_{t-1} + (x_t - mean), x_{t+1} = x_t - rate v_t.

    Source: Hsu, Qi and Brown 2019, Measuring the Effects of Non-Identical Data Distribution. With momentum 0 and rate 1 it
    is FedAvg.
    """

    memory: ClassVar[tuple[str, ...]] = (MOMENTUM,)

    rate: float = option(1.0, "learning rate of the server", low=0.0)
    momentum: float = option(0.9, "momentum of the server", low=0.0, high=1.0)

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        network, moved = {**last[NETWORK], **mean}, {}
        for name in parameters & mean.keys():
            begin, before = last[NETWORK][name], self.momentum * last[MOMENTUM][name]
            moved[name] = before + (begin - mean[name])
            network[name] = torch.lerp(begin, mean[name], self.rate) - self.rate * before
        return {NETWORK: network, MOMENTUM: {**last[MOMENTUM], **moved}}


@dataclass(frozen=True)
class FedOpt(Averaging):
    """Adaptive optimisation at the server: x_{t+1} = x_t + rate m_t / (sqrt(v_t) + tau).

    Reddi et al. 2021, Adaptive Federated Optimization, Alg. 2: D_t = mean - x_t, m_t = beta_1 m_{t-1} + (1 - beta_1) D_t,
    and a subclass defines v_t (`squares`). v_{-1} = tau**2, the smallest value that Alg. 2 allows.
    """

    memory: ClassVar[tuple[str, ...]] = (MOMENTUM, SQUARES)

    rate: float = option(0.1, "learning rate of the server (eta)", low=0.0)
    beta_1: float = option(0.9, "decay of the momentum", low=0.0, high=MOST_DECAY)
    tau: float = option(1e-3, "lower bound of the divisor of a step: a larger value is less adaptive", low=1e-12)

    def initial_memory(self, name: str, like: Tensor) -> Tensor:
        return torch.full_like(like, self.tau**2 if name == SQUARES else 0.0)

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        network, moments, squares = {**last[NETWORK], **mean}, {**last[MOMENTUM]}, {**last[SQUARES]}
        for name in parameters & mean.keys():
            begin = last[NETWORK][name]
            change = mean[name] - begin
            moments[name] = self.beta_1 * moments[name] + (1.0 - self.beta_1) * change
            squares[name] = self.squares(squares[name], change.square())
            network[name] = begin + self.rate * moments[name] / (squares[name].sqrt() + self.tau)
        return {NETWORK: network, MOMENTUM: moments, SQUARES: squares}

    @abstractmethod
    def squares(self, before: Tensor, square: Tensor) -> Tensor:
        """Return v_t from v_{t-1} (`before`) and D_t**2 (`square`), elementwise."""


@STRATEGIES.register("fedadagrad")
@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """Adagrad at the server: v_t = v_{t-1} + D_t**2, with beta_1 = 0 as in the paper."""

    beta_1: float = option(0.0, "decay of the momentum", low=0.0, high=MOST_DECAY)

    def squares(self, before: Tensor, square: Tensor) -> Tensor:
        return before + square


@STRATEGIES.register("fedadam")
@dataclass(frozen=True)
class FedAdam(FedOpt):
    """Adam at the server: v_t = beta_2 v_{t-1} + (1 - beta_2) D_t**2."""

    beta_2: float = option(0.99, "decay of the squares", low=0.0, high=1.0)

    def squares(self, before: Tensor, square: Tensor) -> Tensor:
        return self.beta_2 * before + (1.0 - self.beta_2) * square


@STRATEGIES.register("fedyogi")
@dataclass(frozen=True)
class FedYogi(FedAdam):
    """Yogi at the server: v_t = v_{t-1} - (1 - beta_2) D_t**2 sign(v_{t-1} - D_t**2)."""

    def squares(self, before: Tensor, square: Tensor) -> Tensor:
        return before - (1.0 - self.beta_2) * square * torch.sign(before - square)
