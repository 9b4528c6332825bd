"""ClientApps for measuring engines: what they do is trivial, so that what is measured is the engine."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

echo = ClientApp()


@echo.train()
def train(message: Message, context: Context) -> Message:
    """Send back what came."""
    return Message(message.content, reply_to=message)
