"""Training of the architectures' networks at the server: on its own labels, or on the answers of all sites' networks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.data import class_count, class_meanings, differing, domain_specs, label
from fedloom.clients.data.schema import CLASS, NEXT
from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import TARGETS
from fedloom.conf.randomness import torch_generator
from fedloom.conf.sites import SiteConfig
from fedloom.conf.typed import option
from fedloom.fusion.distillation import Distillation, distil
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.rounds.view import View
from fedloom.server.strategies.architectures import group_by_site, groups_of
from fedloom.server.strategies.by_architecture import cast, has, network_key
from fedloom.server.strategies.public import PublicImages


@dataclass(frozen=True)
class ServerTraining:
    """Training with Adam on the server's images: distillation (FedDF, Lin et al. 2020, Alg. 3), fine-tuning, or both."""

    steps: int = option(0, "steps of Adam in each round, for each architecture; 0: no training", low=0, high=1_000_000)
    rate: float = option(1e-3, "initial learning rate; it decays to 0 by a half cosine", low=0.0, high=1.0)
    batch: int = option(128, "images per step", low=2)
    temperature: float = option(1.0, "temperature of the distillation", low=0.01, high=1000.0)
    weight: float = option(
        1.0,
        "weight of the distillation from the mean of all sites' logits; the rest is cross-entropy with labels",
        low=0.0,
        high=1.0,
    )
    images: PublicImages = option(PublicImages, "the images to train on")

    def check(self, experiment: Experiment, key: str) -> None:
        """Raise UserError if the targets do not fit, the server lacks images, or their labels do not fit the networks."""
        if not self.steps:
            return
        if experiment.task not in (CLASS, NEXT):
            raise UserError(f"{key}: training at the server is for classes and tokens, but the targets here are "
                            f"{TARGETS[experiment.task]}; set the steps to 0, or choose another strategy")  # fmt: skip
        self.images.check(experiment, key)
        if self.weight < 1.0:
            self._check_labels(experiment, key)

    def _check_labels(self, experiment: Experiment, key: str) -> None:
        if experiment.data.heads != "shared":
            raise UserError(f"{key}: its labels need shared outputs; with data.heads={experiment.data.heads}, set weight=1")
        classes, public = groups_of(experiment)[0].architecture.outputs, SiteConfig(domain=self.images.domain)
        if not public.domain:
            return
        if (count := class_count(public)) != classes:
            problem = f"'{public.domain}' has {count} classes and the networks have {classes} outputs"
            raise UserError(f"{key}.domain: {problem}; take another domain, or weight=1, which uses no labels")
        if problem := _other_classes(experiment, public):
            raise UserError(f"{key}.domain: {problem}; take another domain, or weight=1, which uses no labels")

    def trained(self, view: View, states: Mapping[str, State], key: str) -> dict[str, State]:
        """Distil the sites' mean logits on the server's images into each architecture's network (weight < 1: and labels).

        Args:
            view: The sites' contributions.
            states: The states by name of architecture.
            key: The option, for errors.

        Returns:
            The new states by name of architecture; the same ones without steps.
        """
        if not self.steps or not states:
            return dict(states)
        states_after, data = {}, self.images.labelled(view, key)
        device, classes = view.evaluator.device, groups_of(view.experiment)[0].architecture.outputs
        images, labels = view.evaluator.inputs(data.x).to(device), data.y.to(device) if self.weight < 1.0 else None
        answers = mean_answers(view, images) if self.weight > 0.0 else torch.zeros(len(images), classes, device=device)
        settings = Distillation(self.steps, self.rate, self.batch, self.temperature, self.weight)
        for group in groups_of(view.experiment):
            if group.name in states:
                network = view.evaluator.loaded(Model(group.architecture, states[group.name]))
                generator = torch_generator(view.config.seed, "distillation", group.name, str(view.round))
                distil(network, images, answers, settings, generator, labels)
                states_after[group.name] = {name: tensor.cpu().clone() for name, tensor in network.state_dict().items()}
        return states_after


def _other_classes(experiment: Experiment, public: SiteConfig) -> str:
    """Return how a public domain's classes differ from all sites' classes. Empty if they do not, or are unknown."""
    theirs, difference = class_meanings(public), ""
    for name, spec in domain_specs(experiment.config).items() if has_data(experiment.config) else ():
        ours = class_meanings(spec)
        if (k := differing(ours, theirs)) is None:
            return ""
        difference = difference or f"class {k} is '{theirs[k]}' in {label(public)} and '{ours[k]}' in {name}"
    return difference


@torch.no_grad()
def mean_answers(view: View, images: Tensor) -> Tensor:
    """Return the mean logits [k, classes] or [k, steps, classes] of the sites' networks for k images."""
    total, sites = torch.zeros((), device=images.device), [site for site in view.sites if has(view, site)]
    for site in sites:
        group = group_by_site(view.experiment)[site.name]
        state = cast(view.contribution(group.name, site.name), view.server_state(network_key(group.name)))
        total = total + view.evaluator.loaded(Model(group.architecture, state))(images).double()
    return (total / len(sites)).float()
