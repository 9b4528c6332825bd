"""The only place that uses Flower's private parts (flwr 1.41): grids whose nodes are on this machine."""

import itertools
import time
import traceback
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedloom.clients.privacy.guard import SIMULATED
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.conf.schema import Config
from fedloom.server.ledger.blobs import RemoteBlobStore

RUN_ID = 1
FIRST_NODE = 2  # node 1 is the SuperLink


def take_identity() -> None:
    """Allow this process to create Flower messages, as Flower's own runtimes do before they call an app."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = RUN_ID
    TaskIdentity.node_id = SUPERLINK_NODE_ID


def site_context(index: int, sites: int, store: str) -> Context:
    """Return a new Flower context for site `index` of `sites`, for one message. `store`: the folder of sites' states."""
    node_config = {"partition-id": index, "num-partitions": sites, "store": store, SIMULATED: True}
    return Context(RUN_ID, FIRST_NODE + index, node_config, RecordDict(), {})  # type: ignore[arg-type]


def answer(app: ClientApp, message: Message, context: Context) -> Message:
    """Return the app's reply, or an error message if it raises or returns no valid reply."""
    try:
        return checked_reply(message, app(message, context))
    except Exception as error:
        return failure(message, error_text(error))


def checked_reply(message: Message, reply: object) -> Message:
    """Return the app's `reply`, or an error reply if it is not a Message that answers `message`."""
    if isinstance(reply, Message) and reply.metadata.reply_to_message_id == message.metadata.message_id:
        return reply
    problem = "which answers another one" if isinstance(reply, Message) else "not a Message"
    return failure(message, f"the ClientApp returned {type(reply).__name__}, {problem}")


def error_text(error: Exception) -> str:
    """Return an exception as text: its class and its message."""
    return "".join(traceback.format_exception_only(error)).strip()


def failure(message: Message, reason: str) -> Message:
    """Return an error reply to `message` with this reason."""
    return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


class LocalGrid(Grid):
    """Base class of engines: a Grid whose nodes are sites. Engines implement how messages are processed."""

    poll_seconds = 0.0  # pull_messages itself waits
    simulated = True  # its nodes need no proof of identity

    def __init__(self, sites: int, store: Path) -> None:
        take_identity()
        self.sites, self.store = sites, str(store)
        self._numbers = itertools.count(1)
        self._run = Run.create_empty(RUN_ID)

    def begin(self) -> None:
        """Wait until the engine can work, so that its start counts to no round."""

    @abstractmethod
    def submit(self, message: Message) -> None:
        """Queue a message, whose id is set, for its site."""

    @abstractmethod
    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to these messages that have arrived. Without any, wait briefly."""

    @abstractmethod
    def cancel(self, message_ids: Iterable[str]) -> None:
        """Cancel these messages. On return, none of them is running, and their results are deleted."""

    def partial_sum(self, message_id: str) -> PartialSum | None:
        """Return the partial sum with the contribution of this message's reply, or None if the reply itself has it."""
        return None

    def parts(self, run: str) -> RemoteBlobStore | None:
        """Return the store of contributions on the engine's nodes, or None if the server stores them."""
        return None

    def close(self) -> None:
        """Stop the engine."""

    def describe(self) -> str:
        """Return a short description of the engine for the user."""
        return ""

    def context(self, message: Message) -> Context:
        """Return the context of the site that receives a message."""
        return site_context(message.metadata.dst_node_id - FIRST_NODE, self.sites, self.store)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return range(FIRST_NODE, FIRST_NODE + self.sites)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(next(self._numbers))
            ids.append(message.metadata.message_id)
            self.submit(message)
        return ids

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        pending, replies = set(self.push_messages(messages)), []
        deadline = None if timeout is None else time.monotonic() + timeout
        while pending and (deadline is None or time.monotonic() < deadline):
            for reply in self.pull_messages(pending):
                pending.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        self.cancel(pending)
        return replies


def store_folder(config: Config) -> Path:
    """Return the folder for the simulated sites' own states, inside the run's folder."""
    return (Path(config.run.root) / config.run.name / "sites").resolve()
