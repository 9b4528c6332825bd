"""FedNova at the server (Wang et al. 2020): the mean change per unit of work, times the mean work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from clients.objectives.fednova import WORK
from conf.schema import Config
from fusion.exact import State
from server.rounds.run import Run
from server.strategies.averaging import NETWORK, Averaging, check_steps
from server.strategies.base import STRATEGIES


@STRATEGIES.register("fednova")
@dataclass(frozen=True)
class FedNova(Averaging):
    """x <- x + tau_eff sum p_i (y_i - x) / ||a_i||_1 with tau_eff = sum p_i ||a_i||_1 (Sec. 4.1), p_i a site's share of the
    images. Sites whose steps are alike make it FedAvg."""

    goes_with: ClassVar[str] = "fednova"

    def check(self, config: Config) -> None:
        """UserError for sites whose steps are not of plain SGD."""
        super().check(config)
        check_steps(config)

    def beside(self, run: Run) -> State:
        """No work yet."""
        return {WORK: torch.zeros(())}

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        network, work = {**last[NETWORK]}, mean[WORK]
        for name in network.keys() & mean.keys():
            begin = network[name]
            network[name] = begin + work * (mean[name] - begin) if name in parameters else mean[name]
        return {NETWORK: network}
