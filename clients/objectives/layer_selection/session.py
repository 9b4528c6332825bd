"""The session of a site that learns which layers to share while it trains (LASEM, Algorithm 1)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples, outputs, to_float
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives.base import Session, Task
from fedloom.clients.objectives.layer_selection.configurations import LEARNED, Configuration
from fedloom.clients.objectives.layer_selection.options import SelectionOptions
from fedloom.clients.objectives.layer_selection.posterior import LIKELIHOODS, PRIORS, TASKS, Belief, shares
from fedloom.clients.objectives.layer_selection.search import Pace, Step
from fedloom.clients.objectives.layer_selection.tree import Tree
from fedloom.clients.objectives.plain import below, state_of
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.state import State

SELECTION = "selection"  # up: the site's selection
MASS = "mass"  # [groups]: probability of each group to be shared, the mean over the round's steps
CHOSEN = "chosen"  # [groups]: the configuration that the site uses
COUNTS = "counts"  # [configurations], for TASKS: the site's batches by most probable configuration; down: all other sites'
BEGUN = "begun"  # in a site's state: whether it has trained its own layers, after any warm-up
NETWORK, OWN_PARTS, SHARED_PARTS = "network/", "own/", "shared/"  # in a site's state: prefixes of tensors' names


class SelectionSession(Session):
    """Trains the site's own layers, its own parameters of shared layers, and its copy of the shared parameters."""

    def __init__(self, objective: SelectionOptions, task: Task) -> None:
        self.objective, self.task = objective, task
        self.outputs, self.layers = outputs(task.config, task.site.spec), objective.layers_of(task.config, task.site)
        stored = task.own or {}
        shared = task.incoming.get(MEAN) or self.layers.shared(task.config, task.site)
        added = below(stored, OWN_PARTS) or self.layers.own(task.config, task.site)
        self.begun = has_begun(stored)
        self.belief = belief_of(objective, len(self.layers.groups), stored, task.incoming.get(COUNTS, {}), task.round)
        network = below(stored, NETWORK) or initial_state(task.config, task.site.name, task.site)
        follows = objective.warm_up and not self.begun
        task.network.load_state_dict({**network, **self.layers.weights(shared, added)} if follows else network)
        self.network, self.shared, self.added = task.network, _parameters(shared, task), _parameters(added, task)
        self.tree = Tree(self.network, self.layers.groups)
        self.evidence: tuple[Tensor, Tensor] | None = None
        self.pace, self.masses = Pace(objective.m_steps), list[Tensor]()

    def training_examples(self, images: Examples) -> Examples:
        """Return the images not held out for the E-step. The held-out images are the same in all rounds."""
        number = round(self.objective.held_out * len(images))
        if not number or self.objective.mode != LEARNED or number == len(images):
            return images
        draw = torch_generator(self.task.config.seed, self.task.site.name, "held out")
        held, others = torch.randperm(len(images), generator=draw).split([number, len(images) - number])
        self.evidence = to_float(images.x[held].to(self.task.device)), images.y[held].to(self.task.device)
        return Examples(images.x[others], images.y[others])

    def parameters(self) -> list[nn.Parameter]:
        return [*self.network.parameters(), *self.shared.values(), *self.added.values()]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return a loss whose gradient is that of Eq. 3 and 4 for this batch, or an unbiased estimate of it."""
        step = Step(
            tree=self.tree,
            belief=self.belief,
            likelihood=LIKELIHOODS[self.objective.likelihood],
            shared=self.layers.weights(self.shared, self.added),
            outputs=self.outputs,
            images=images,
            labels=labels,
            generator=self.task.generator,
            held=self.pace.due(),
            evidence=self.evidence,
            smoothing=self.task.config.training.label_smoothing,
        )
        loss, posterior = self.objective.way.step(step)
        self.pace.took(posterior)
        self.masses.append(shares(self.belief, posterior))
        return loss

    def contribution(self) -> dict[str, State]:
        chosen = torch.tensor(self.belief.best(), dtype=torch.float32)
        mass = torch.stack(self.masses).mean(0).float() if self.masses else chosen
        selection = {MASS: mass, CHOSEN: chosen}
        if self.objective.prior == TASKS:
            selection[COUNTS] = self.belief.counts.long()
        return {SITE: _plain(self.shared), SELECTION: selection}

    def local_state(self) -> State | None:
        return {
            **prefixed(NETWORK, state_of(self.network)),
            **prefixed(OWN_PARTS, _plain(self.added)),
            **prefixed(SHARED_PARTS, _plain(self.shared)),
            COUNTS: self.belief.counts,
            CHOSEN: torch.tensor(self.belief.best()),
            BEGUN: torch.tensor(self.begun or self.task.round > self.objective.warm_up),
        }


def belief_of(objective: SelectionOptions, groups: int, stored: State, others: Mapping[str, Tensor], round: int) -> Belief:
    """Return the Belief in a site's stored state, or a uniform one. It is fixed if `mode` is, and in a warm-up.

    A site that has already trained its own layers does not warm up again.
    """
    warms_up = round <= objective.warm_up and not has_begun(stored)
    configurations = objective.configurations(groups, warms_up)
    nothing = torch.zeros(len(configurations), dtype=torch.float64)
    stored_counts = stored.get(COUNTS, nothing)
    counts = stored_counts.double() if len(stored_counts) == len(nothing) else nothing
    return Belief(
        configurations,
        counts,
        others[COUNTS].double() if COUNTS in others else nothing,
        PRIORS[objective.prior],
        objective.fixed(configurations, warms_up),
        objective.smoothing,
    )


def has_begun(stored: State) -> bool:
    """Return whether a site has trained its own layers, after any warm-up.

    States of earlier versions have only counts.
    """
    flag = stored.get(BEGUN, stored.get(COUNTS))
    return flag is not None and bool(flag.any())


def composed(objective: SelectionOptions, task: Task, shared: Mapping[str, Tensor]) -> tuple[State, Configuration] | None:
    """Return the site's network in its configuration, and the configuration; None if the site has not trained yet.

    `shared`: the shared parameters; empty: those that the site trained last.
    """
    stored = task.own
    if stored is None or not (network := below(stored, NETWORK)):
        return None
    layers = objective.layers_of(task.config, task.site)
    best = tuple(stored[CHOSEN].tolist())
    weights = layers.weights(shared or below(stored, SHARED_PARTS), below(stored, OWN_PARTS))
    used = {name: tensor for name, tensor in weights.items() if best[layers.group_of(name)]}
    return {**network, **used}, best


def prefixed(prefix: str, state: Mapping[str, Tensor]) -> State:
    """Add a prefix to the names of a state's tensors."""
    return {prefix + name: tensor for name, tensor in state.items()}


def _parameters(state: Mapping[str, Tensor], task: Task) -> dict[str, nn.Parameter]:
    """Convert a state to parameters, sorted by name: gradients add up in this order, and files have no order."""
    tensors = {name: state[name] for name in sorted(state)}
    return {name: nn.Parameter(tensor.detach().to(task.device, copy=True)) for name, tensor in tensors.items()}


def _plain(parameters: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in parameters.items()}
