"""The ClientApps of a soak: one has the plan's faults and needs Ray's workers, as it kills its process; one replays."""

import os
import signal
import time
from collections.abc import Container, Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.messages import OWN, TRAIN, read_order
from fedloom.sims.benchmarks import untrained
from fedloom.sims.benchmarks.soak_plan import LOST_ONCE, LOST_TWICE, SLOW_SECONDS, plan_of
from fedloom.sims.benchmarks.soak_replies import LOST_STATE, PARTIALS, REFUSED, Fault

EVENTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "slow": lambda: time.sleep(SLOW_SECONDS),
}

app = ClientApp()
app.query()(untrained.identify)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the shifted initial network, or fail, or change the reply, as the plan says."""
    order = read_order(message.content)
    config = parsed(configuration(order, message.content, None), order.run)
    plan = plan_of(len(config.roster), config.rounds)
    if event := plan.event(order.site, order.round):
        EVENTS[event]()
    reply, kind = untrained.train(message, context), plan.odd(order.site, order.round)
    return _fault(kind, again=OWN in message.content)(reply) if kind else reply


def _fault(kind: str, again: bool) -> Fault:
    if kind == LOST_TWICE or (kind == LOST_ONCE and not again):
        return LOST_STATE
    if kind == LOST_ONCE:
        return lambda reply: reply
    return PARTIALS[kind] if kind in PARTIALS else REFUSED[kind][0]


class Replay(ClientApp):
    """A ClientApp that sends the shifted initial network, but raises for the sites in `dropped` (their indices by round)."""

    def __init__(self, dropped: Mapping[int, Container[int]]) -> None:
        super().__init__()
        self.dropped = dropped

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == TRAIN:
            order = read_order(message.content)
            if order.site in self.dropped[order.round]:
                raise RuntimeError("its reply did not count")
        return untrained.app(message, context)
