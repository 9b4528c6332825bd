"""Continue heartbeats after unexpected answers. Flower's (1.41) end at the first one.

Without heartbeats, the server counts a node as offline and a task as failed.
"""

import os
import signal

import httpx
from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender

_once = HeartbeatSender._heartbeat


def keep_beating() -> None:
    """Make this process repeat failed heartbeats, with pauses, after any answer.

    If the server no longer knows the node, the process stops itself with SIGTERM.
    """
    HeartbeatSender._heartbeat = _again  # type: ignore[method-assign]


def _again(sender: HeartbeatSender) -> None:
    try:
        _once(sender)
    except HeartbeatFailure:
        raise
    except RuntimeError:  # the node is unknown, and must register again
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise  # the task has ended, or the node is not admitted
        raise HeartbeatFailure from error
