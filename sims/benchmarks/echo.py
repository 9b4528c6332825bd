"""A ClientApp that sends back what it receives: what is measured with it is the engine alone."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the message's content."""
    return Message(message.content, reply_to=message)
