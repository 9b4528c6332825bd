"""Send one HTTP request to a server that may be slow, silent or hostile."""

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from http import HTTPStatus

import httpx

from fedloom.conf.errors import plain

MOST_BYTES = 1 << 17  # of an answer
MOST_REASON = 200  # characters
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # other lines have the URL, which may contain a secret


class NoAnswerError(Exception):
    """The server gave no usable answer in time. The text is the reason."""


def post(url: str, content: bytes, headers: Mapping[str, str], seconds: float) -> bytes:
    """Send a POST request, and return the answer's content, at most MOST_BYTES of it. Redirections are not followed.

    `seconds`: for the whole exchange, however slowly the server sends its bytes.

    Raises:
        NoAnswerError: The server cannot be reached, answers with a status other than 2xx, or takes too long.
    """
    try:
        return asyncio.run(asyncio.wait_for(_post(url, content, headers), seconds))
    except TimeoutError:
        raise NoAnswerError("it takes too long") from None
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswerError(_reason(error)) from None


async def _post(url: str, content: bytes, headers: Mapping[str, str]) -> bytes:
    client = httpx.AsyncClient(timeout=None, verify=ssl.create_default_context())
    async with client, client.stream("POST", url, content=content, headers=headers) as answer:
        if not answer.is_success:
            raise NoAnswerError(_shown(answer.reason_phrase) or HTTPStatus(answer.status_code).phrase)
        received = b""
        async for piece in answer.aiter_raw():
            received += piece
            if len(received) >= MOST_BYTES:
                break
        return received


def _reason(error: BaseException) -> str:
    """Return why a connection failed: the system's own word for it, if there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno and cause.errno > 0:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return _shown(str(error)) or type(error).__name__


def _shown(text: str) -> str:
    return plain(text).strip()[:MOST_REASON]
