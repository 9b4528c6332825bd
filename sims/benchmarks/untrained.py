"""ClientApps that answer real orders of sum aggregation without training, so that what is measured is everything else.

`app` sends the initial network, shifted by the number of the site and the round. `faulty` does the same, but a seeded 1 % of
the answers raise and 0.5 % kill the process (in a Ray worker; elsewhere they raise, which is the same to the server).
"""

import functools
import os
import signal
import sys

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedloom.clients.app import app as real
from fedloom.clients.networks.base import EXTRACTOR, HEAD
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.messages import METRICS, ROUND, SITE, TaskInstructions, read_order, to_arrays
from fedloom.conf.randomness import generator
from fedloom.fusion.state import State

RAISES, KILLS = 0.01, 0.005

app = ClientApp()
faulty = ClientApp()


@app.query()
@faulty.query()
def identify(message: Message, context: Context) -> Message:
    """As the real ClientApp does."""
    return real(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """The shifted initial network."""
    return Message(contribution(read_order(message.content), message.content), reply_to=message)


@faulty.train()
def train_or_fail(message: Message, context: Context) -> Message:
    """The shifted initial network, or a fault."""
    order = read_order(message.content)
    kind = fault(order.site, order.round)
    if kind == "kill" and sys.argv[0].endswith("default_worker.py"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind:
        raise RuntimeError(f"seeded fault: {kind}")
    return Message(contribution(order, message.content), reply_to=message)


def fault(site: int, round: int) -> str:
    """What goes wrong at this site in this round: "raise", "kill" or nothing."""
    draw = float(generator(0, "faults", str(site), str(round)).random())
    return "kill" if draw < KILLS else "raise" if draw < KILLS + RAISES else ""


def contribution(order: TaskInstructions, content: RecordDict) -> RecordDict:
    """The reply's content: the initial network, shifted by the number of the site and the round."""
    shift = 1e-6 * (order.site + 1000 * order.round)
    moved = {name: tensor + shift for name, tensor in _initial(configuration(order.config, content, None)).items()}
    reply = RecordDict({METRICS: MetricRecord({"loss": 1.0, "samples": 1})})
    for record, prefix in ((SITE, EXTRACTOR), (ROUND, HEAD)):
        reply[record] = to_arrays({name: tensor for name, tensor in moved.items() if name.startswith(prefix)})
    return reply


@functools.lru_cache(maxsize=1)
def _initial(config: str) -> State:
    return initial_state(parsed(config))
