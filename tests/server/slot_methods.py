"""Methods of one's own that treat their slots in unusual ways; FedProx but for their slots and rounds."""

from dataclasses import dataclass
from typing import Any

import torch

from fedloom.clients.objectives import MEAN, SITE, Answer
from fedloom.clients.objectives.sum_aggregation import ExactSession, SumAggregation
from fedloom.clients.protocol.messages import ROUND
from fedloom.server.strategies import TRAIN, Model, Models, RecordSpec, RoundContext, State, Sum, View
from tests.outside.federated_methods.fedprox import FedProx, Prox

SIZES: State = {"n": torch.zeros(2)}


@dataclass(frozen=True)
class Asked(Prox):
    def answer(self, kind: str, task: Any, images: Any) -> Answer:
        return Answer({"n": {"n": torch.ones(2)}})


@dataclass(frozen=True)
class Saved(FedProx):
    """Its network is what the last round saved, so no contribution can leave it."""

    def begin(self, context: RoundContext) -> None:
        super().begin(context)
        context.save_server_state("network", context.initial())

    def round(self, context: RoundContext) -> None:
        super().round(context)
        context.save_server_state("network", context.mean("networks"))

    def models(self, view: View) -> Models:
        return Models({"saved": lambda: Model(view.architecture(), view.server_state("network"))})


@dataclass(frozen=True)
class Misspelt(FedProx):
    def round(self, context: RoundContext) -> None:
        context.gather(TRAIN, {MEAN: self.mean(context)}, {SITE: RecordSpec(self.mean(context), slot="netwrks")})


@dataclass(frozen=True)
class Unsaved(FedProx):
    def round(self, context: RoundContext) -> None:
        context.server_state("strt")


@dataclass(frozen=True)
class Twice(FedProx):
    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        for reply in context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}):
            context.put("networks", reply.site, {name: 2 * tensor for name, tensor in reply[SITE].items()}, reply.samples)
            context.put("networks", reply.site, reply[SITE], reply.samples)


@dataclass(frozen=True)
class Enough(FedProx):
    fewest: int = 2

    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        for number, reply in enumerate(context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}), start=1):
            context.put("networks", reply.site, reply[SITE], reply.samples)
            if number == self.fewest:
                break


@dataclass(frozen=True)
class Second(FedProx):
    def slots(self, experiment: Any) -> dict[str, Any]:
        return {"networks": Sum(weighted=True), "n": Sum()}

    def round(self, context: RoundContext) -> None:
        super().round(context)
        context.gather("sizes", {}, {"n": RecordSpec(SIZES, slot="n")})


@dataclass(frozen=True)
class Begun(Second):
    def begin(self, context: RoundContext) -> None:
        super().begin(context)
        context.put_all("networks", context.initial())
        context.put_all("n", SIZES)


@dataclass(frozen=True)
class Nested(FedProx):
    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        for reply in context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}):
            context.put("networks", reply.site, reply[SITE], reply.samples)
            assert len(list(context.ask("sizes", {}, {"n": RecordSpec(SIZES)}, [reply.site]))) == 1


@dataclass(frozen=True)
class Unequal(FedProx):
    def slots(self, experiment: Any) -> dict[str, Any]:
        return {"networks": Sum(weighted=True), "again": Sum(weighted=True)}

    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        for reply in context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}):
            context.put("networks", reply.site, reply[SITE], reply.samples)
            context.put("again", reply.site, reply[SITE], 1)


@dataclass(frozen=True)
class Fraction(FedProx):
    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        for reply in context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}):
            context.put("networks", reply.site, reply[SITE], 2.5)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Unknown(FedProx):
    def round(self, context: RoundContext) -> None:
        mean = self.mean(context)
        for reply in context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}):
            context.put("network", reply.site, reply[SITE], reply.samples)


@dataclass(frozen=True)
class Slashed(FedProx):
    def slots(self, experiment: Any) -> dict[str, Any]:
        return {"networks": Sum(weighted=True), "networks/x": Sum()}


@dataclass(frozen=True)
class NoSlots(FedProx):
    def slots(self, experiment: Any) -> Any:
        return ["networks"]


@dataclass(frozen=True)
class Spoiled(SumAggregation):
    def session(self, task: Any) -> Any:
        return SpoiledSession(self, task) if task.site.name == "site-0001" else ExactSession(self, task)


class SpoiledSession(ExactSession):
    """Its head can be summed, and its network cannot."""

    def contribution(self) -> dict[str, State]:
        sent = super().contribution()
        sent[ROUND] = {name: tensor + 50 for name, tensor in sent[ROUND].items()}
        return {**sent, SITE: {name: 1e6 * tensor for name, tensor in sent[SITE].items()}}
