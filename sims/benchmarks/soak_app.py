"""ClientApps of a soak: what does wrong what the plan says (in Ray's workers only: it kills its process), and its replay."""

import os
import signal
import time
from collections.abc import Container, Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.clients.app import app as real
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.messages import OWN, TRAIN, TaskInstructions, read_order
from fedloom.sims.benchmarks import untrained
from fedloom.sims.benchmarks.soak_plan import LOST_ONCE, LOST_TWICE, SLOW_SECONDS, plan_of
from fedloom.sims.benchmarks.soak_replies import LOST_STATE, PARTIALS, REFUSED, Fault

app = ClientApp()


@app.query()
def identify(message: Message, context: Context) -> Message:
    """As the real ClientApp does."""
    return real(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """The shifted initial network, after and with what the plan says."""
    order = read_order(message.content)
    config = parsed(configuration(order.config, message.content, None))
    plan = plan_of(len(config.roster), config.rounds)
    if event := plan.event(order.site, order.round):
        _EVENTS[event]()
    reply = Message(untrained.contribution(order, message.content), reply_to=message)
    kind = plan.odd(order.site, order.round)
    return _fault(kind, again=OWN in message.content)(reply) if kind else reply


def _fault(kind: str, again: bool) -> Fault:
    if kind == LOST_TWICE or (kind == LOST_ONCE and not again):
        return LOST_STATE
    if kind == LOST_ONCE:
        return lambda reply: reply
    return PARTIALS[kind] if kind in PARTIALS else REFUSED[kind][0]


_EVENTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda: time.sleep(SLOW_SECONDS),
}


class Replay(ClientApp):
    """The shifted initial network from all but those whose replies are known not to have counted."""

    def __init__(self, dropped: Mapping[int, Container[int]]) -> None:
        """`dropped`: of each round, the places of these sites."""
        super().__init__()
        self.dropped = dropped

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == TRAIN and self._failed(read_order(message.content)):
            raise RuntimeError("its reply did not count")
        return untrained.app(message, context)

    def _failed(self, order: TaskInstructions) -> bool:
        return order.site in self.dropped[order.round]
