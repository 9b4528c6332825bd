"""The Flower ClientApp: it says which site it is, and trains when it is told to."""

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.job import read_job
from clients.messages import WHO
from conf.errors import UserError

app = ClientApp()


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Answer the site's name (node-config `site`) or its place (node-config `partition-id`)."""
    who = {key: str(context.node_config[key]) for key in ("site", "partition-id") if key in context.node_config}
    if not who:
        raise UserError("node-config has neither site nor partition-id: start the node with one of them")
    return Message(RecordDict({WHO: ConfigRecord({**who})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round at this site: load the own state, train, save it, answer with the contribution."""
    job = read_job(message, context)
    torch.set_num_threads(job.config.engine.threads)
    return Message(job.train(), reply_to=message)
