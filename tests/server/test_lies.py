"""A thousand hostile replies, drawn by hypothesis, as the bytes that a SuperLink carries: none ends a run or enters the sum
unseen. (tests/flower sends some of them through a SuperLink.)"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import pytest
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from hypothesis import given, settings

from fedloom.clients.protocol.messages import TRAIN
from fedloom.server.flower.grid import received
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.transport import TooFewRepliesError
from fedloom.sims.engines.inline import InlineGrid
from tests.flower.lies import Lie, lies
from tests.flower.speaker import Node
from tests.server.parts import Run, contribution, set_up, small, sum_of_contributions

pytestmark = pytest.mark.slow

LIAR = 1  # its place
MOST = 2**22  # bytes of a reply


class Box(Node):
    """Keeps what is sent, as the server would get it."""

    came: Message

    def push(self, reply: Message, tree: ObjectTree, parts: Mapping[str, bytes]) -> bool:
        reply.metadata.__dict__["_message_id"] = tree.object_id
        self.came = received(message_to_proto(remove_content_from_message(reply)), dict(parts), MOST)
        return True


class LyingGrid(InlineGrid):
    """The inline engine, at whose second site every order to train is answered with a lie."""

    lie: Lie

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        if not self._queue or self._queue[0].metadata.message_type != TRAIN:
            return super().pull_messages(message_ids)
        box = Box()
        self.lie(box, self._queue.popleft())
        return [box.came]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = small(tmp_path_factory.mktemp("lies"), "network={name: mlp, widths: [2]}", samples=20)
    yield set_up(config, grid=LyingGrid)


@settings(max_examples=1000)
@given(lie=lies())
def test_no_lie_ends_a_run_or_enters_the_sum_unseen(run: Run, lie: Lie):
    """Each is refused, with its site's name and a reason, or harmless: the sum is that of the contributions."""
    aggregation, loop, site = run.aggregate, run.loop, run.aggregate.setup.sites[LIAR]
    assert isinstance(run.grid, LyingGrid)
    run.grid.lie, loop.transport.dropped, before = lie, {}, aggregation.digest()
    other = contribution(aggregation, "site-0000")
    round = aggregation.round_context(1, Participation([site], 1), loop.transport)
    with contextlib.suppress(TooFewRepliesError):
        aggregation.strategy.round(round)
    if round.losses:
        assert not loop.transport.dropped and sum_of_contributions(aggregation) == aggregation.digest()["sum"]
    else:
        assert list(loop.transport.dropped) == [site.name] and loop.transport.dropped[site.name].isprintable()
        assert aggregation.digest() == before
    assert all(bool((contribution(aggregation, "site-0000")[name] == tensor).all()) for name, tensor in other.items())
    aggregation.abandon()
    assert aggregation.digest() == before
