"""The Flower ClientApp of a node in a real federation: as in app.py, with arrays in bundles."""

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.app.message import make_message
from flwr.clientapp import ClientApp

from fedloom.clients.privacy.guard import failed
from fedloom.clients.protocol.bundles import bundled_reply, may_bundle, unbundled
from fedloom.clients.work import answer, identify
from fedloom.conf.errors import UserError

Answer = Callable[[Message, Context], Message]


def carried(answers: Answer) -> Answer:
    """Let a function answer messages whose arrays may travel in bundles."""

    def bundling(message: Message, context: Context) -> Message:
        if not message.has_content() or not may_bundle(message.content):
            return answers(message, context)
        try:
            content = unbundled(message.content)
        except Exception:  # bytes from outside
            error = UserError("order: cannot be read; server and site need the same version of fedloom")
            return failed(error, message, {})
        reply = answers(make_message(message.metadata, content=content), context)
        return reply if reply.has_error() else make_message(reply.metadata, content=bundled_reply(reply.content))

    return bundling


app = ClientApp()
app.query()(identify)
app.query("ask")(carried(answer))
app.train()(carried(answer))
