"""The inline engine runs sites in this process, one after the other. It is for tests, debugging and tiny models."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedloom.clients.app import app
from fedloom.conf import machine
from fedloom.conf.schema import Config
from fedloom.sims.engines.adapter import LocalGrid, checked_reply, error_text, failure, store_folder
from fedloom.sims.engines.share import WHOLE, Share


class InlineGrid(LocalGrid):
    """A Grid that queues messages. Each pull processes one of them in this process, so replies arrive one by one."""

    in_order = True

    def __init__(self, sites: int, store: Path, app: ClientApp = app) -> None:
        super().__init__(sites, store)
        self._app = app
        self._queue: deque[Message] = deque()

    def submit(self, message: Message) -> None:
        self._queue.append(message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        for message in self._queue:
            if message.metadata.message_id in wanted:
                self._queue.remove(message)
                return [self._answer(message)]
        return []

    def _answer(self, message: Message) -> Message:
        try:
            return checked_reply(message, self._app(message, self.context(message)))
        except Exception as error:
            return failure(message, error_text(error))

    def cancel(self, message_ids: Iterable[str]) -> None:
        cancelled = set(message_ids)
        self._queue = deque(message for message in self._queue if message.metadata.message_id not in cancelled)

    def describe(self) -> str:
        return "inline: sites run one after the other in this process"


def start(config: Config, share: Share = WHOLE) -> InlineGrid:
    """Return the inline engine for a configuration. It uses one core, whatever `share` is."""
    machine.reuse_freed_memory()
    return InlineGrid(len(config.roster), store_folder(config))
