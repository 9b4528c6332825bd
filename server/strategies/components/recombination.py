"""Recombination: every published head on every site's extractor, and the accuracy of each pair.

Recombination accuracy (Gygli et al. 2021, Sec. 4) is the accuracy of site j's head on site i's extractor without any
training, on i's test examples of the classes that j's head knows. Site i measures it and sends numbers.
"""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.data import class_meanings, label
from fedloom.clients.networks import Architecture, Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.components.objective import (
    KINDS,
    LABELS,
    OUTPUTS,
    PUBLISH,
    RECOMBINE,
    Components,
)
from fedloom.clients.objectives.components.session import class_tensors
from fedloom.clients.objectives.components.sharing import ALONE, EXTRACTOR, HEAD
from fedloom.clients.objectives.plain import below
from fedloom.clients.protocol.messages import COMPONENTS, MODEL, TOTAL, right_of
from fedloom.clients.protocol.reply_checks import ReplyError, can_be
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.ledger.declared import PerClientSlot, Slot
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import looked_at
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import ResidualInfluence, Strategy
from fedloom.server.strategies.by_architecture import cast
from fedloom.server.strategies.components.classes import SiteClasses, check_alike

TRAINED = "trained"  # slot: marks each site that has trained, and continues from its own state
MATRIX = "recombination"  # saved: correct predictions and images, [sites, sites] each, in the roster's order
RIGHT_OF, IMAGES = "right", "images"


@dataclass(frozen=True)
class Recombining(Strategy):
    """A method that leaves each site its own network, and at the end measures heads on other sites' extractors.

    Subclasses define `train` and `sent`.
    """

    every: int = option(0, "rounds from one measurement of all pairs to the next; 0: only after the last round", low=0)
    alike: list[Any] = option(
        [], "groups of names that mean the same class in different data sets: [[car, automobile], ...]"
    )

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        return {COMPONENTS: PerClientSlot(), TRAINED: PerClientSlot()}

    def check(self, experiment: Experiment) -> None:
        objective = components_of(experiment)
        check_alike(self.alike)
        if experiment.data.heads == "task":
            raise UserError("data.heads: strategy head_transfer takes shared or own: a head has its site's classes")
        names = {site.name for site in experiment.sites}
        if unknown_site := next((name for name in objective.private if name not in names), ""):
            raise UserError(f"objective.private: unknown site '{unknown_site}'")
        objective.published("")
        check_parts(experiment)

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """Warn about BatchNorm's stored statistics (Sec. C.1), which belong to features of another extractor.

        Also warn about names in `alike` that no site's classes have, if the classes are known.
        """
        messages: list[str] = []
        if experiment.evaluation.statistics == "running" and any(
            name.endswith("running_mean")
            for architecture in {experiment.architecture(site) for site in experiment.sites}
            for name in shapes(architecture)
        ):
            effect = "stored statistics belong to another extractor's features and reduce the measured accuracy"
            source = "(32.4% in Gygli et al. 2021, App. C.1)"
            messages.append(f"evaluation.statistics=running: {effect} {source}; take batch or recomputed")
        if self.alike and has_data(experiment.config):
            sites = experiment.sites
            known = SiteClasses.from_reports(
                experiment, sites, {site.name: class_meanings(site.spec) for site in sites}, ()
            ).all()
            for name in [name for group in self.alike for name in group if name not in known]:
                problem = unknown("class in strategy.alike", name, known)  # plain: ignore
                messages.append(f"{problem}; it has no effect")
        return messages

    def round(self, context: RoundContext) -> None:
        """Train. If a measurement is due, publish components and recombine them."""
        self.train(context)
        length = self.schedule(context.experiment).length(context.config.rounds)
        if context.number >= length or (self.every and context.number % self.every == 0):
            self.publish(context)
            self.recombine(context)

    @abstractmethod
    def train(self, context: RoundContext) -> None:
        """Run the method's own part of a round. Call `mark` for each site that has trained."""

    def publish(self, context: RoundContext) -> None:
        """Ask sites for the components that they publish, and store these."""
        likes = {site.name: _published(context.experiment, site) for site in context.sites}
        asked = [site for site in self.networked(context) if likes[site.name]]

        def expected(site: Site) -> dict[str, RecordSpec]:
            like = likes[site.name]
            return {COMPONENTS: RecordSpec(like, bounded=False, whole=False, check=_complete_parts(like))}

        for reply in context.ask(PUBLISH, {}, expected, asked, needed=False):
            if reply[COMPONENTS]:
                context.put(COMPONENTS, reply.site, reply[COMPONENTS])

    def recombine(self, context: RoundContext) -> None:
        """Ask every site for the accuracy of each published head on its extractor."""
        indices = {site.name: site.index for site in context.config.roster}
        classes = self.site_classes(context)
        config = context.config
        publishers = looked_at(config, [site for site in self.published(context) if site in classes.names])
        heads = {site: part for site in publishers if (part := self.component(context, site, HEAD))}
        extractors = looked_at(config, [site.name for site in self.networked(context) if site.name in classes.names])
        asked = [site for site in self.networked(context) if site.name in set(extractors)]
        if not heads or not asked:
            return
        known, records = classes.all(), {f"{MODEL}/{indices[site]}": part for site, part in heads.items()}
        outputs = {site: classes.places(site, known) for site in {*heads, *(site.name for site in asked)}}

        def content(site: Site) -> dict[str, State]:
            return {**records, **{f"{KINDS}{indices[head]}": {OUTPUTS: outputs[head], LABELS: outputs[site.name]}
                                  for head in heads}}  # fmt: skip

        size = len(indices)
        right, images = torch.zeros(size, size, dtype=torch.int64), torch.zeros(size, size, dtype=torch.int64)
        numbers = [name for record in records for name in (right_of(record), f"{TOTAL}/{record.removeprefix(MODEL + '/')}")]
        for reply in context.ask(RECOMBINE, content, {}, asked, metrics=numbers, needed=False):
            for head in heads:
                hits, total = reply.metrics[right_of(f"{MODEL}/{indices[head]}")], reply.metrics[f"{TOTAL}/{indices[head]}"]
                if can_be(hits, total):
                    right[reply.site.index, indices[head]], images[reply.site.index, indices[head]] = hits, total
        context.save_server_state(MATRIX, {RIGHT_OF: right, IMAGES: images})

    def recompute_derived(self, context: RoundContext) -> None:
        """Delete the measurements of sites that are gone."""
        if MATRIX not in context.slots.keeps():
            return
        left = torch.zeros(len(context.config.roster), dtype=torch.bool)
        left[[site.index for site in context.sites]] = True
        context.save_server_state(
            MATRIX,
            {name: table * (left[:, None] & left[None, :]) for name, table in context.server_state(MATRIX).items()},
        )

    def models(self, view: View) -> Models:
        """Return the networks of sites that published both parts."""

        def own(site: Site) -> Model:
            domains = (label(site.spec),) if view.config.data.heads == "own" else None  # other domains have other classes
            return Model(view.architecture(site), _cast(view, site), domains)

        complete = [site for site in view.sites if site.name in self.published(view)
                 and all(self.component(view, site.name, prefix) for prefix in (EXTRACTOR, HEAD))]  # fmt: skip
        return Models({site.name: lambda site=site: own(site) for site in complete})

    def summary_entries(self, view: View) -> Mapping[str, Any]:
        """Return the recombination accuracy of every measured pair, and the bytes that a site sends in a round."""
        if MATRIX not in view.slots.keeps():
            return {}
        names = {site.index: site.name for site in view.sites}
        table = view.server_state(MATRIX)
        indices = [index for index in names if bool(table[IMAGES][index].any() or table[IMAGES][:, index].any())]
        cells = [[_share(table, row, column) for column in indices] for row in indices]
        mode = components_of(view.experiment).mode
        return {
            "recombination": {mode: {"sites": [names[index] for index in indices], "accuracy": cells, **self.traffic(view)}}
        }

    def traffic(self, view: View) -> dict[str, int]:
        """Return `bytes`, which a site sends in a round, and `fedavg_bytes`, which it would send with FedAvg."""
        state = view.initial(site=view.sites[0])
        return {"bytes": _bytes(self.sent(view)), "fedavg_bytes": _bytes(state)}

    @abstractmethod
    def sent(self, view: View) -> State:
        """Return tensors with the names and shapes of those that a site sends in a round."""

    def site_classes(self, context: RoundContext) -> SiteClasses:
        """Return the class names of all sites' outputs."""
        return SiteClasses.from_reports(context.experiment, context.sites, context.class_names(context.sites), self.alike)

    def networked(self, context: RoundContext) -> list[Site]:
        """Return the sites that have a trained network."""
        return [site for site in context.sites if context.has(TRAINED, site.name)]

    def published(self, view: View) -> list[str]:
        """Return the names of the sites that published components."""
        return [site.name for site in view.sites if view.has(COMPONENTS, site.name)]

    def component(self, view: View, site: str, prefix: str) -> State:
        """Return the part of a site's network with this prefix (EXTRACTOR or HEAD), or {} if it did not publish that part.

        Raises:
            UserError: The site has no published components.
        """
        if not view.has(COMPONENTS, site):
            gone = site in {match.name for match in view.config.roster} - {match.name for match in view.sites}
            reason = "it was forgotten, and its components were deleted" if gone else "it published none"
            raise UserError(f"site '{site}' has no components in the catalogue: {reason}")
        [match] = [match for match in view.sites if match.name == site]
        return {name: tensor for name, tensor in _cast(view, match).items() if name.startswith(prefix)}

    def mark(self, context: RoundContext, site: Site) -> None:
        """Record (in a slot) that a site has trained in this round."""
        context.put(TRAINED, site, {"round": torch.tensor([float(context.number)])})

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        if components_of(view.experiment).mode == ALONE or view.rounds_with(names) < 2:
            return ()
        reason = "after round 1 they were trained with parts that include the forgotten sites"
        return (ResidualInfluence("the other sites' networks and published components", reason),)


def components_of(experiment: Experiment) -> Components:
    """Return the configured objective. Raise UserError if it is not `components`."""
    objective = experiment.objective
    if not isinstance(objective, Components):
        raise UserError(
            f"objective.name: got '{experiment.config.objective.get('name')}', strategy head_transfer takes components"
        )
    return objective


def check_parts(experiment: Experiment) -> None:
    """Raise UserError, naming two sites, if their heads have different shapes or take different features."""
    sites = experiment.sites
    shapes = {architecture: head_shapes(architecture) for architecture in {experiment.architecture(site) for site in sites}}
    first = sites[0]
    for site in sites[1:]:
        expected, other = shapes[experiment.architecture(first)], shapes[experiment.architecture(site)]
        if differing := next((name for name in {**expected, **other} if expected.get(name) != other.get(name)), ""):
            shape, wanted = _shape_text(other.get(differing)), _shape_text(expected.get(differing))
            problem = f"{site.name}'s head has '{differing}' {shape}, {first.name}'s {wanted}"
            raise UserError(f"network: heads cannot be exchanged: {problem}; use one network.head (and network.channels)")


def head_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a head, by name, without the dimension of the classes."""
    state, by_class = below(shapes(architecture), HEAD), class_tensors(architecture)
    return {name: tuple(tensor.shape[1:] if name in by_class else tensor.shape) for name, tensor in state.items()}


def feature_shape(architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of one example's features."""
    with torch.device("meta"), torch.no_grad():
        network = architecture.build().to("meta").eval()
        return tuple(network.extractor(architecture.form.zeros(1)).shape[1:])


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else f"of {' x '.join(map(str, shape)) or 'one row'} (without rows of classes)"


def _cast(view: View, site: Site) -> State:
    """Return the components that a site published, bit for bit, with the types of its network."""
    return cast(view.slots.contributions.floats(site.name, COMPONENTS), shapes(view.architecture(site)))


def _published(experiment: Experiment, site: Site) -> State:
    prefixes = components_of(experiment).published(site.name)
    state = shapes(experiment.architecture(site))
    return {name: tensor for name, tensor in state.items() if prefixes and name.startswith(prefixes)}


@functools.lru_cache(maxsize=64)
def shapes(architecture: Architecture) -> State:
    """Return the tensors of a network with this architecture, on the meta device: names, shapes and types."""
    return {name: tensor.to("meta") for name, tensor in architecture.build().state_dict().items()}


def _complete_parts(like: Mapping[str, Tensor]) -> Any:
    """Return a check that a site publishes only whole parts of its network."""

    def check(record: State) -> None:
        for prefix in (EXTRACTOR, HEAD):
            wanted = {name for name in like if name.startswith(prefix)}
            if wanted & record.keys() and not wanted <= record.keys():
                raise ReplyError(f"record '{COMPONENTS}' holds an incomplete {prefix[:-1]}; sites publish whole parts")

    return check


def _share(table: Mapping[str, Tensor], row: int, column: int) -> float | None:
    total = int(table[IMAGES][row, column])
    return int(table[RIGHT_OF][row, column]) / total if total else None


def _bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def check_outputs(experiment: Experiment) -> None:
    """Raise UserError, naming two sites, if they cannot share one head because their numbers of classes differ."""
    first = experiment.sites[0]
    for site in experiment.sites:
        has, other = experiment.architecture(site).outputs, experiment.architecture(first).outputs
        if has != other:
            problem = f"{site.name}'s has {has} classes, {first.name}'s {other}"
            raise UserError(f"objective.mode={components_of(experiment).mode} takes one head for all sites, but {problem}")
