"""A ClientApp that answers real orders of sum aggregation without training: everything else is measured.

It sends the initial network, shifted by the number of the site and the round.
"""

import functools

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedloom.clients.app import app as real
from fedloom.clients.networks.base import EXTRACTOR, HEAD
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.messages import METRICS, ROUND, SITE, TaskInstructions, read_order, to_arrays
from fedloom.fusion.state import State

app = ClientApp()


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Answer a query as the real ClientApp does."""
    return real(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the shifted initial network: a contribution without training."""
    return Message(contribution(read_order(message.content), message.content), reply_to=message)


def contribution(order: TaskInstructions, content: RecordDict) -> RecordDict:
    """Return a reply's content: the initial network, shifted by 1e-6 * (site + 1000 * round)."""
    shift = 1e-6 * (order.site + 1000 * order.round)
    moved = {name: tensor + shift for name, tensor in _initial(configuration(order, content, None), order.run).items()}
    reply = RecordDict({METRICS: MetricRecord({"loss": 1.0, "samples": 1})})
    for record, prefix in ((SITE, EXTRACTOR), (ROUND, HEAD)):
        reply[record] = to_arrays({name: tensor for name, tensor in moved.items() if name.startswith(prefix)})
    return reply


@functools.lru_cache(maxsize=1)
def _initial(config: str, run: str) -> State:
    return initial_state(parsed(config, run))
