"""The site's half of compatible components and of the methods that share a part of a network."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.clients.data import Images, outputs, to_float
from fedloom.clients.evaluation.accuracy import pieces
from fedloom.clients.networks import HeadView, Network
from fedloom.clients.networks.base import HEAD, PARTS
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Objective, Session, Task
from fedloom.clients.objectives.components.auxiliary import AUXILIARY, Auxiliary
from fedloom.clients.objectives.components.session import CompatibleSession, SharedParts, head_of, of
from fedloom.clients.objectives.components.sharing import COMPATIBLE, SHARING, Sharing
from fedloom.clients.objectives.fedproto import COUNTS, PROTOTYPES, SUMS
from fedloom.clients.protocol.messages import COMPONENTS, MODEL, TOTAL, right_of
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.registry import section_of
from fedloom.conf.typed import option
from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.state import State

PUBLISH = "publish"  # a question: which components of its network the site lets others have
RECOMBINE = "recombine"  # a question: how good others' heads are on the site's extractor
KINDS = "kinds/"  # down, before a head's number: OUTPUTS of it and LABELS of the site, each the number of its class
OUTPUTS, LABELS = "outputs", "labels"


@OBJECTIVES.register("components")
@dataclass(frozen=True)
class Components(Objective):
    """Cross-entropy of the site's own network, with auxiliary heads or parts that sites share."""

    mode: str = option(
        COMPATIBLE, "auxiliary heads, or another method's way to share a part of networks", choices=tuple(SHARING)
    )
    auxiliary: list[Any] = option(["dcc"], "tasks of shared heads: names, or sections {name: rp, weight: 1, ...}")
    same_start: bool = option(False, "all networks start with identical weights (IIW)")
    pull: float = option(
        0.1,
        "of the squared distance (L2) between the task head and the common classes' auxiliary head, in the loss",
        low=0.0,
    )
    unit: float = option(
        0.0, "of the squared distance of each image's feature norm (L2) from 1, in the loss (App. C.1)", low=0.0
    )
    publish: list[str] = option(["extractor", "head"], "components that the server may pass on: extractor, head")
    private: list[str] = option([], "sites that publish nothing")

    @functools.cached_property
    def tasks(self) -> dict[str, Auxiliary]:
        """The auxiliary tasks by name; those of the common classes first. UserError for unknown ones."""
        if self.mode != COMPATIBLE:
            return {}
        found: dict[str, Auxiliary] = {}
        for place, given in enumerate(self.auxiliary):
            where = f"objective.auxiliary[{place}]"
            section = section_of(given, where, "{name: rp}")
            name = str(section.get("name")).rpartition(":")[2]
            if name in found:
                raise UserError(f"{where}: '{name}' is named twice")
            found[name] = AUXILIARY.build(section, where)
        return dict(sorted(found.items(), key=lambda item: not item[1].supervised))

    @property
    def sharing(self) -> Sharing:
        """What sites share."""
        return SHARING[self.mode]

    def session(self, task: Task) -> Session:
        """Start on a task."""
        if self.mode == COMPATIBLE:
            return CompatibleSession(task, self.sharing, self.same_start, self.tasks, self.pull, self.unit)
        return SharedParts(task, self.sharing)

    def network(self, task: Task, images: Images) -> State | None:
        """What was sent, or the site's own, fitted to its images where the method says so."""
        if MODEL in task.incoming or task.own is None:
            return task.incoming.get(MODEL)
        if not self.sharing.fitted:
            return {**task.own}
        from fedloom.clients.training.learner import learn  # which itself needs this package

        session = SharedParts(task, Sharing(stages=((1.0, self.sharing.fitted),)))
        learn(session, images, task.experiment, task.site, task.round, task.device)
        return session.local_state()

    def answer(self, kind: str, task: Task, images: Images) -> Answer:
        """PUBLISH: components. RECOMBINE: right answers with each head that was sent. PROTOTYPES: features of classes."""
        known = {PUBLISH: self._published, RECOMBINE: self._recombined, PROTOTYPES: self._prototypes}
        if kind not in known:
            return super().answer(kind, task, images)
        state = self.network(task, images)
        if state is None:
            raise UserError(f"{task.site.name}: has no network of its own yet; it has not trained")
        task.network.load_state_dict(state)
        task.network.eval()
        try:
            return known[kind](task, images)
        finally:
            task.network.train()  # the next site trains in it

    def published(self, site: str) -> tuple[str, ...]:
        """Prefixes of what a site publishes."""
        if odd := next((part for part in self.publish if part not in PARTS), ""):
            raise unknown("objective.publish", odd, PARTS)
        return () if site in self.private else tuple(PARTS[part] for part in self.publish)

    def _published(self, task: Task, images: Images) -> Answer:
        prefixes = self.published(task.site.name)
        state = {
            name: tensor.cpu()
            for name, tensor in task.network.state_dict().items()
            if prefixes and name.startswith(prefixes)
        }
        return Answer({COMPONENTS: state} if state else {})

    def _recombined(self, task: Task, images: Images) -> Answer:
        """Of each head the right answers among the site's test images of classes that the head knows, and their number."""
        test, found = task.held_out("test"), dict[str, int | float]()
        own = task.architecture
        for record in [name for name in task.incoming if name.startswith(f"{MODEL}/")]:
            number = record.removeprefix(f"{MODEL}/")
            kinds = task.incoming[KINDS + number]
            head = head_of(own, len(kinds[OUTPUTS])).to(task.device)
            head.load_state_dict(of(task.incoming[record], HEAD))
            right, total = _right(task, Network(task.network.extractor, head), kinds, test, images)
            found |= {right_of(record): right, f"{TOTAL}/{number}": total}
        return Answer(metrics=found)

    def _prototypes(self, task: Task, images: Images) -> Answer:
        classes, first = task.architecture.classes, outputs(task.config, task.site.spec).start
        total, counts = torch.zeros(()), torch.zeros(classes)
        with torch.no_grad():
            for pixels, labels in _batches(task, images):
                members = torch.nn.functional.one_hot(labels + first, classes).float()
                features = task.network.extractor(to_float(pixels.to(task.device))).cpu()
                total = total + torch.einsum("nk,n...->k...", members, features)
                counts += members.sum(0)
        return Answer({PROTOTYPES: {SUMS: total / len(images), COUNTS: counts / len(images)}})


def _right(task: Task, network: Network, kinds: State, test: Images, images: Images) -> tuple[int, int]:
    """Right answers, and images that count: those of classes that the head knows."""
    wanted = kinds[LABELS][test.y]
    counts = torch.isin(wanted, kinds[OUTPUTS]) & (wanted >= 0)
    if not bool(counts.any()):
        return 0, 0
    chosen, statistics = Images(test.x[counts], wanted[counts]), task.config.evaluation.statistics
    if statistics == "recomputed":
        recompute_statistics(network, [to_float(pixels.to(task.device)) for pixels, _ in _batches(task, images)])
    view, right = HeadView(network, slice(0, len(kinds[OUTPUTS])), statistics).eval(), 0
    with torch.inference_mode():
        for pixels, labels in _batches(task, chosen):
            guesses = kinds[OUTPUTS][view(to_float(pixels.to(task.device))).argmax(1).cpu()]
            right += int((guesses == labels).sum())
    return right, len(chosen)


def _batches(task: Task, images: Images) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parts = pieces(len(images), task.config.evaluation.batch)
    return list(zip(images.x.tensor_split(parts), images.y.tensor_split(parts), strict=True))
