"""Heartbeats that go on: Flower's own (1.41) end with the first answer that they do not expect, and nobody restarts them.

A node without heartbeats is offline for the server; a task without them has failed.
"""

import os
import signal

import httpx
from flwr.supercore.heartbeat import HeartbeatFailure, HeartbeatSender

_once = HeartbeatSender._heartbeat


def keep_beating() -> None:
    """From now on a heartbeat of this process is sent again, with pauses, whatever is answered to it.

    But for an answer by which the server does not know the node any more: then the process is told to stop.
    """
    HeartbeatSender._heartbeat = _again  # type: ignore[method-assign]


def _again(sender: HeartbeatSender) -> None:
    try:
        _once(sender)
    except HeartbeatFailure:
        raise
    except RuntimeError:  # a node that is not known has to say anew that it is there
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise  # the task has ended, or the node's key is not let in
        raise HeartbeatFailure from error
