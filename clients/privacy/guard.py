"""Filter what leaves a site after an error: kinds of errors and names of options, never the site's own values.

An error's text can contain a path, an environment variable or data. The full text goes to the site's own log.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedloom.clients.protocol.failures import (
    BlamedError,
    DropoutError,
    LostStateError,
    SpentError,
    SummedBeforeError,
    UnknownConfigurationError,
    UntrainedError,
)
from fedloom.clients.protocol.messages import BLAMED, LOST, SUMMED_BEFORE, UNKNOWN
from fedloom.clients.training.learner import DivergedError
from fedloom.conf.errors import UserError, of_storage
from fedloom.conf.plugins import place_of

STORAGE = 1001  # error code of a simulated site where this machine's storage is at fault; Flower's codes are small
SIMULATED = "simulated"  # node-config of engines whose sites run on the user's own machines: errors leave in full
LOG = logging.getLogger("fedloom.site")

_OPTION = re.compile(
    r"(?:[^:]{0,120}: )?((?:run|engine|data|training|federation|privacy|evaluation|network|objective|strategy|sites|seed"
    r"|order)(?:\.\w+|\[\d+\])*): "
)


def failed(error: BaseException, message: Message, node_config: Mapping[str, Any]) -> Message:
    """Return the reply to a message that raised an error: in a simulation in full, else without the site's values.

    In a simulation, the reply says if the machine's storage is at fault (STORAGE).
    """
    full, store = bool(node_config.get(SIMULATED)), node_config.get("store")
    if full and (line := of_storage(error, Path(str(store)).parent if store else None)):
        return Message(Error(STORAGE, line), reply_to=message)
    if isinstance(error, LostStateError):  # the server can repair this
        return Message(RecordDict({LOST: ConfigRecord({"round": error.round})}), reply_to=message)
    if isinstance(error, UnknownConfigurationError):
        return Message(RecordDict({UNKNOWN: ConfigRecord({"digest": error.digest})}), reply_to=message)
    if isinstance(error, SummedBeforeError):  # the server can start the round again
        LOG.warning("%s", error)
        return Message(RecordDict({SUMMED_BEFORE: ConfigRecord({"round": error.round})}), reply_to=message)
    if isinstance(error, BlamedError):
        LOG.warning("%s", error)
        return Message(RecordDict({BLAMED: ConfigRecord({"site": error.site})}), reply_to=message)
    if not full and not isinstance(error, DropoutError):
        LOG.error("a message could not be answered", exc_info=error)
    reason = full_error_text(error) if full else public_error_text(error)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def full_error_text(error: BaseException) -> str:
    """Return an error as text for the site's own log, or for simulations.

    If it is not a UserError, the text also has its type and its place in the code.
    """
    if isinstance(error, UserError):
        return str(error)
    place = place_of(error)
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"


def public_error_text(error: BaseException) -> str:
    """Return the part of an error that the server may read: its type, and the option at fault.

    The message may contain the site's own values, so it stays at the site. A DivergedError, DropoutError or UntrainedError
    has none, and is returned in full.
    """
    if isinstance(error, DivergedError | DropoutError | UntrainedError):
        return str(error)
    if isinstance(error, SpentError):
        return error.public
    kind = type(error).__name__
    at = _OPTION.match(str(error)) if isinstance(error, UserError) else None
    return f"{kind} at {at[1]}; the site's own log says more" if at else f"{kind}; the site's own log says more"
