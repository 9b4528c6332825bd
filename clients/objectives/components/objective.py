"""The client's half of compatible components, and of methods that share a part of a network."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.clients.data import Examples, outputs, to_float
from fedloom.clients.data.schema import CLASS
from fedloom.clients.evaluation.accuracy import image_batches
from fedloom.clients.networks import HeadView, Network
from fedloom.clients.networks.base import HEAD, PARTS
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Objective, Session, Task
from fedloom.clients.objectives.components.auxiliary import AUXILIARY, Auxiliary
from fedloom.clients.objectives.components.session import CompatibleSession, SharedParts, head_of
from fedloom.clients.objectives.components.sharing import COMPATIBLE, SHARING, Sharing
from fedloom.clients.objectives.fedproto import COUNTS, PROTOTYPES, SUMS
from fedloom.clients.objectives.plain import below
from fedloom.clients.protocol.failures import UntrainedError
from fedloom.clients.protocol.messages import COMPONENTS, MODEL, TOTAL, right_of
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.registry import section_of
from fedloom.conf.typed import option
from fedloom.fusion.cla_ot.repair import recompute_statistics
from fedloom.fusion.state import State

PUBLISH = "publish"  # question: the components of its network that the site lets others use
RECOMBINE = "recombine"  # question: the accuracy of others' heads on the site's extractor
KINDS = "kinds/"  # down, + a head's number: class numbers of the head's OUTPUTS and of the site's LABELS
OUTPUTS, LABELS = "outputs", "labels"


@OBJECTIVES.register("components")
@dataclass(frozen=True)
class Components(Objective):
    """Cross-entropy of the site's own network, with auxiliary heads or parts that sites share."""

    targets = (CLASS,)
    mode: str = option(
        COMPATIBLE, "compatible: auxiliary heads; else the method that says which part is shared", choices=tuple(SHARING)
    )
    auxiliary: list[Any] = option(["dcc"], "tasks of shared heads: names, or sections {name: rp, weight: 1, ...}")
    same_start: bool = option(False, "all networks start with identical weights (IIW)")
    pull: float = option(
        0.1,
        "weight of the squared distance (L2) between the task head and the common classes' auxiliary head",
        low=0.0,
    )
    unit: float = option(0.0, "weight of the squared distance of each image's feature norm (L2) from 1 (App. C.1)", low=0.0)
    publish: list[str] = option(["extractor", "head"], "components that the server may pass on: extractor, head")
    private: list[str] = option([], "sites that publish nothing")

    @functools.cached_property
    def tasks(self) -> dict[str, Auxiliary]:
        """The auxiliary tasks by name, those on common classes first. Raises UserError for an unknown one."""
        if self.mode != COMPATIBLE:
            return {}
        tasks: dict[str, Auxiliary] = {}
        for index, entry in enumerate(self.auxiliary):
            where = f"objective.auxiliary[{index}]"
            section = section_of(entry, where, "{name: rp}")
            name = str(section.get("name")).rpartition(":")[2]
            if name in tasks:
                raise UserError(f"{where}: '{name}' is named twice")
            tasks[name] = AUXILIARY.build(section, where)
        return dict(sorted(tasks.items(), key=lambda item: not item[1].supervised))

    @property
    def sharing(self) -> Sharing:
        """The parts of the network that sites share, average and fit, by `mode`."""
        return SHARING[self.mode]

    def session(self, task: Task) -> Session:
        if self.mode == COMPATIBLE:
            return CompatibleSession(task, self.sharing, self.same_start, self.tasks, self.pull, self.unit)
        return SharedParts(task, self.sharing)

    def network(self, task: Task, images: Examples) -> State | None:
        """Return the network in the message, or the site's own, fitted to its images if the method says so."""
        if MODEL in task.incoming or task.own is None:
            return task.incoming.get(MODEL)
        if not self.sharing.fitted:
            return {**task.own}
        from fedloom.clients.training.learner import learn  # it imports this package

        session = SharedParts(task, Sharing(stages=((1.0, self.sharing.fitted),)))
        learn(session, images, task.experiment, task.site, task.round, task.device)
        return session.local_state()

    def answer(self, kind: str, task: Task, images: Examples) -> Answer:
        """Answer PUBLISH (components), RECOMBINE (right answers with each head) or PROTOTYPES (features by class)."""
        known = {PUBLISH: self._published, RECOMBINE: self._recombined, PROTOTYPES: self._prototypes}
        if kind not in known:
            return super().answer(kind, task, images)
        state = self.network(task, images)
        if state is None:
            raise UntrainedError(task.site.name, "use")
        task.network.load_state_dict(state)
        task.network.eval()
        try:
            return known[kind](task, images)
        finally:
            task.network.train()  # the next site trains in it

    def published(self, site: str) -> tuple[str, ...]:
        """Return the name prefixes of the tensors that a site publishes (extractor, head)."""
        if odd := next((part for part in self.publish if part not in PARTS), ""):
            raise unknown("objective.publish", odd, PARTS)
        return () if site in self.private else tuple(PARTS[part] for part in self.publish)

    def _published(self, task: Task, images: Examples) -> Answer:
        prefixes = self.published(task.site.name)
        state = {
            name: tensor.cpu()
            for name, tensor in task.network.state_dict().items()
            if prefixes and name.startswith(prefixes)
        }
        return Answer({COMPONENTS: state} if state else {})

    def _recombined(self, task: Task, images: Examples) -> Answer:
        """Count right answers with each head on the site's test examples of classes that the head knows."""
        test, metrics = task.held_out("test"), dict[str, int | float]()
        own = task.architecture
        for record in [name for name in task.incoming if name.startswith(f"{MODEL}/")]:
            number = record.removeprefix(f"{MODEL}/")
            kinds = task.incoming[KINDS + number]
            head = head_of(own, len(kinds[OUTPUTS])).to(task.device)
            head.load_state_dict(below(task.incoming[record], HEAD))
            right, total = _right(task, Network(task.network.extractor, head), kinds, test, images)
            metrics |= {right_of(record): right, f"{TOTAL}/{number}": total}
        return Answer(metrics=metrics)

    def _prototypes(self, task: Task, images: Examples) -> Answer:
        classes, first = task.architecture.outputs, outputs(task.config, task.site.spec).start
        total, counts = torch.zeros(()), torch.zeros(classes)
        with torch.no_grad():
            for pixels, labels in image_batches(images, task.config.evaluation.batch):
                members = torch.nn.functional.one_hot(labels + first, classes).float()
                features = task.network.extractor(to_float(pixels.to(task.device))).cpu()
                total = total + torch.einsum("nk,n...->k...", members, features)
                counts += members.sum(0)
        return Answer({PROTOTYPES: {SUMS: total / len(images), COUNTS: counts / len(images)}})


def _right(task: Task, network: Network, kinds: State, test: Examples, images: Examples) -> tuple[int, int]:
    """Return the number of right answers, and of images of classes that the head knows."""
    classes = kinds[LABELS][test.y]
    counts = torch.isin(classes, kinds[OUTPUTS]) & (classes >= 0)
    if not bool(counts.any()):
        return 0, 0
    evaluation, chosen = task.config.evaluation, Examples(test.x[counts], classes[counts])
    statistics, batch = evaluation.statistics, evaluation.batch
    if statistics == "recomputed":
        recompute_statistics(network, [to_float(pixels.to(task.device)) for pixels, _ in image_batches(images, batch)])
    view, right = HeadView(network, slice(0, len(kinds[OUTPUTS])), statistics).eval(), 0
    with torch.inference_mode():
        for pixels, labels in image_batches(chosen, batch):
            guesses = kinds[OUTPUTS][view(to_float(pixels.to(task.device))).argmax(1).cpu()]
            right += int((guesses == labels).sum())
    return right, len(chosen)
