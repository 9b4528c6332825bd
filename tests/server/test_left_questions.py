"""Methods that leave questions early, hold them, or read several at once: a reply counts once, in its round, or never."""

from pathlib import Path
from typing import ClassVar

import pytest

from fedloom.clients.objectives import MEAN, SITE
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.blobs import NodeLostError
from fedloom.server.strategies import TRAIN, RecordSpec, RoundContext
from fedloom.server.strategies.base import OwnStrategyError
from tests.outside.federated_methods.fedprox import FedProx
from tests.server.parts import Recorder, folder
from tests.server.resumes import configured, results, resumed, run

HERE = "tests.server.test_left_questions"


class Asks(FedProx):
    def ask(self, context: RoundContext, first: int = 0, last: int | None = None):
        mean = self.mean(context)
        return context.ask(TRAIN, {MEAN: mean}, {SITE: RecordSpec(mean)}, context.participants[first:last])

    def count(self, context: RoundContext, reply) -> None:
        context.put("networks", reply.site, reply[SITE], reply.samples)


class First(Asks):
    """Reads one reply and leaves."""

    def round(self, context: RoundContext) -> None:
        for reply in self.ask(context):
            self.count(context, reply)
            break


class Holds(Asks):
    """Reads one reply, and holds the question beyond the round."""

    held: ClassVar[list] = []

    def round(self, context: RoundContext) -> None:
        assert not [reply for question in self.held for reply in question]  # of an earlier round
        self.held.append(self.ask(context))
        self.count(context, next(self.held[-1]))


class Both(Asks):
    """Reads two questions at once, and then puts what a third site sent."""

    def round(self, context: RoundContext) -> None:
        third = next(self.ask(context, 2))
        for one, other in zip(self.ask(context, 0, 1), self.ask(context, 1, 2), strict=True):
            self.count(context, one)
            self.count(context, other)
        self.count(context, third)


class Crossed(Asks):
    """As `Both`, but one question ends while the other one's reply is open."""

    def round(self, context: RoundContext) -> None:
        third = next(self.ask(context, 2))
        first, second = self.ask(context, 0, 1), self.ask(context, 1, 2)
        one, other = next(first), next(second)
        assert next(first, None) is None
        self.count(context, other)
        assert next(second, None) is None
        self.count(context, one)
        self.count(context, third)


class Lost(Asks):
    """Puts a reply, and then meets a lost node; the second attempt leaves the question, and asks other sites."""

    held: ClassVar[list] = []

    def round(self, context: RoundContext) -> None:
        if not self.held:
            self.held.append(self.ask(context, 0, 1))
            self.count(context, next(self.held[-1]))
            raise NodeLostError("a node is gone")
        self.held.clear()
        for reply in self.ask(context, 1):
            self.count(context, reply)


class Fails(Asks):
    """As Asks, but fails in round 2, in the middle, as long as `broken` is true."""

    broken: ClassVar[bool] = False
    held: ClassVar[list] = []

    def round(self, context: RoundContext) -> None:
        self.held[:] = [self.ask(context)]
        for number, reply in enumerate(self.held[0]):
            self.count(context, reply)
            if self.broken and context.number == 2 and number:
                raise RuntimeError("in the middle")


def recorded(root: Path, name: str) -> list[int]:
    """Run with one of these methods; return the number of replies of each round."""
    listener, config = Recorder(), configured(root, f"strategy={HERE}:{name}", "objective=fedavg", "baselines=[]")
    run(config, listener)
    assert [problem for problem in check(folder(config)) if problem.severity != "note"] == []
    assert [reply for reply in listener.replies if not reply[1]] == []
    return [record["replies"] for record in listener.records]


@pytest.mark.parametrize(("name", "replies"), [("First", 1), ("Holds", 1), ("Both", 3), ("Crossed", 3), ("Lost", 2)])
def test_each_reply_counts_once_in_its_round(tmp_path: Path, name: str, replies: int):
    assert recorded(tmp_path, name) == 4 * [replies]


@pytest.mark.parametrize(("name", "sites"), [("First", [0]), ("Holds", [0]), ("Both", [0, 1, 2]), ("Lost", [1, 2])])
def test_what_is_put_during_these_replies_is_in_the_sum(tmp_path: Path, name: str, sites: list[int]):
    config = configured(tmp_path, f"strategy={HERE}:{name}", "objective=fedavg", "baselines=[]")
    run(config)
    in_sum = {site for site, rounds in results(folder(config))["latest"].items() if rounds}
    assert in_sum == {f"site-{site:04}" for site in sites}


def test_a_round_that_failed_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = f"strategy={HERE}:Fails", "objective=fedavg", "baselines=[]"
    whole, failed = configured(tmp_path / "whole", *words), configured(tmp_path / "failed", *words)
    run(whole)
    monkeypatch.setattr(Fails, "broken", True)
    listener = Recorder()
    with pytest.raises(OwnStrategyError, match="in the middle"):
        run(failed, listener)
    assert [record["replies"] for record in listener.records] == [3]
    assert len(listener.replies) == 4  # round 1, and one reply of round 2; the last one was not applied
    Fails.held.clear()
    assert len(listener.replies) == 4
    monkeypatch.setattr(Fails, "broken", False)
    resumed(failed)
    assert results(folder(failed)) == results(folder(whole))
