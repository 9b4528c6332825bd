"""The Flower ClientApp: it says which site it is, trains when it is told to, and answers the methods' questions."""

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.clients.privacy.guard import guard
from fedloom.clients.protocol.messages import PROTOCOL, WHO
from fedloom.clients.reading import alone, erased, moment, read_job
from fedloom.conf.errors import UserError

app = ClientApp(mods=[guard])


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Answer the site's name (node-config `site`) or its place (node-config `partition-id`), and the protocol's version."""
    who = {key: str(context.node_config[key]) for key in ("site", "partition-id") if key in context.node_config}
    if not who:
        raise UserError("node-config has neither site nor partition-id: start the node with one of them")
    return Message(RecordDict({WHO: ConfigRecord({**who, "protocol": PROTOCOL})}), reply_to=message)


@app.query("ask")
@app.train()
def answer(message: Message, context: Context) -> Message:
    """One question to this site. To train: load the own state, train, save it, answer with the contribution."""
    with alone(context):
        if (done := erased(message, context)) is not None:
            return Message(done, reply_to=message)
        with moment(message):
            job = read_job(message, context)
            torch.set_num_threads(job.config.engine.threads)
            return Message(job.answer(), reply_to=message)
