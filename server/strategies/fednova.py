"""FedNova at the server (Wang et al. 2020): the mean change per unit of work, times the mean work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.fednova import AVERAGE, WORK
from fedloom.clients.objectives.steps import gradient_weight
from fedloom.clients.training.learner import step_count
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.view import View
from fedloom.server.strategies.averaging import NETWORK, NETWORKS, ROUND, Averaging, check_steps, counted, parameters_of
from fedloom.server.strategies.base import STRATEGIES

ROUNDS = "rounds"  # beside the work: how long the run was to the sites, whose schedule follows it


@STRATEGIES.register("fednova")
@dataclass(frozen=True)
class FedNova(Averaging):
    """x <- x + tau_eff sum p_i (y_i - x) / ||a_i||_1 with tau_eff = sum p_i ||a_i||_1 (Sec. 4.1), p_i a site's share of the
    images. Sites whose steps are alike make it FedAvg.

    The work ||a_i||_1 of a site follows from the configuration and its number of images: no site says what it is. Those that
    are asked hear their tau_eff and multiply by it, so that what they send is the change of a network. Where others counted
    in the end (one did not answer, or was forgotten), the server's step is as much longer as theirs is larger.
    """

    default_objective: ClassVar[str] = "fednova"

    def check(self, experiment: Experiment) -> None:
        """UserError for sites whose steps are not of plain SGD."""
        super().check(experiment)
        check_steps(experiment)

    def begin(self, context: RoundContext) -> None:
        """No work yet."""
        super().begin(context)
        context.save_server_state(WORK, _told(0.0, 0))

    def extra_records(self, context: RoundContext) -> dict[str, State]:
        """The mean work of the sites that are asked."""
        samples = [images for site in context.participants if (images := context.images(site))]
        told = _told(self._mean_work(context.experiment, context.length, context.number, samples), context.length)
        context.save_server_state(WORK, told)
        return {WORK: told}

    def next_state(self, view: View) -> dict[str, State]:
        """The mean of what the sites sent, or further on by their share of the work that they heard of."""
        begin, found, share = view.server_state(NETWORK), super().next_state(view)[NETWORK], self._share(view)
        moved = {name: torch.lerp(begin[name], found[name], share) for name in parameters_of(view.experiment)}
        return {NETWORK: {**found, **moved}}

    def _share(self, view: View) -> float:
        """tau_eff of the sites that count, over that which they heard; 1 where some count with what they sent in an earlier
        round, as they do under masks: their sum cannot be taken apart by what each had heard."""
        if WORK not in view.slots.keeps():
            raise UserError("strategy 'fednova': this run's sites said their work themselves; go on with the code that it "
                            "was made with")  # fmt: skip
        told, last = view.server_state(WORK), int(view.server_state(ROUND)["number"])
        names = [site.name for site in counted(view).sites if view.has(NETWORKS, site.name)]
        if not told[AVERAGE] or any(view.last_put(name) != last for name in names):
            return 1.0
        samples = [view.last_samples(name) for name in names]
        return self._mean_work(view.experiment, int(told[ROUNDS]), last, samples) / float(told[AVERAGE]) if samples else 1.0

    def _mean_work(self, experiment: Experiment, rounds: int, round: int, samples: Sequence[int]) -> float:
        """tau_eff of sites with so many images, times the rate; 0 of none."""
        steps = [step_count(images, experiment) for images in samples]
        works = {number: gradient_weight(experiment.training, rounds, round, number) for number in set(steps)}
        times = samples if self.weighting == "samples" else [1] * len(samples)
        parts = [number * works[each] for number, each in zip(times, steps, strict=True)]
        return math.fsum(parts) / sum(times) if parts else 0.0


def _told(work: float, rounds: int) -> State:
    return {AVERAGE: torch.tensor(work, dtype=torch.float64), ROUNDS: torch.tensor(rounds)}
