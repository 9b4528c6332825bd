"""Ask the SuperLink of a server's folder: which nodes it knows, and to start a run. Uses Flower's (1.41) own client.

Flower's command does the same, but needs a second of processor time to start.
"""

import base64
import hashlib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml
from flwr.cli.build import build_fab_from_files
from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.protobuf.client import ProtobufRequestContext

from fedloom.conf.errors import UserError, plain
from fedloom.server.flower.http_answers import wary
from fedloom.sims.federation.plan import CONNECTION, FLOWER
from fedloom.sims.federation.proxies import none_named

CREDENTIALS, CONFIG = "credentials.yaml", "config.toml"  # in Flower's folder; the SuperLink writes them
MOST_SHOWN = 300  # characters of an error


class _Owner:
    """Sends the token of the server's owner with each request."""

    def __init__(self, token: str) -> None:
        self._header = f"Bearer {token}"

    def intercept(
        self, context: ProtobufRequestContext, call_next: Callable[[ProtobufRequestContext], httpx.Response]
    ) -> httpx.Response:
        """Add the token to a request."""
        context.request.headers["authorization"] = self._header
        return call_next(context)


def nodes(folder: Path) -> dict[str, str]:
    """Return the status of each node that the SuperLink of a server's folder knows, by the node's id, oldest first."""
    known = _ask(folder, lambda client: client.ListNodes(ListNodesRequest())).nodes_info
    return {str(node.node_id): node.status for node in sorted(known, key=lambda node: node.registered_at)}


def start_run(folder: Path, app: str, config: Mapping[str, str]) -> str:
    """Start a run at the SuperLink of a server's folder, and return its id.

    `app`: the pyproject.toml of its Flower app, which has no other file. `config`: overrides its run-config.
    """
    bundle, _ = build_fab_from_files({"pyproject.toml": app.encode()})
    fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
    request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
    return str(_ask(folder, lambda client: client.StartRun(request)).run_id)


def _ask(folder: Path, question: Callable[[ControlHttpClient], Any]) -> Any:
    """Return what `question` returns for a client of the folder's SuperLink. Raises UserError if the SuperLink fails."""
    try:
        address, authority, token = _connection(folder / FLOWER)
        with none_named():
            client = ControlHttpClient.from_server_address(address, False, authority, [_Owner(token)])
        wary(client)
        with client:
            return question(client)
    except httpx.HTTPStatusError as error:
        problem = f"answers {error.response.status_code}: {plain(error.response.text)[:MOST_SHOWN]}"
        raise UserError(f"{folder}: the SuperLink {problem}") from None
    except httpx.HTTPError as error:
        raise UserError(f"{folder}: the SuperLink cannot be reached: {plain(str(error))[:MOST_SHOWN]}") from None
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise UserError(
            f"{folder}: the SuperLink cannot be asked ({type(error).__name__}: {plain(str(error))[:MOST_SHOWN]}); "
            "has the server been started?"
        ) from None


def _connection(home: Path) -> tuple[str, bytes, str]:
    """Return the address of the SuperLink, the certificate of its authority, and the owner's token, from Flower's folder."""
    link = tomllib.loads((home / CONFIG).read_text(encoding="utf-8"))["superlink"][CONNECTION]
    held = yaml.safe_load((home / CREDENTIALS).read_text(encoding="utf-8"))
    token = base64.b64decode(held[ACCESS_TOKEN_STORE_KEY % link["address"]]).decode("ascii")
    return link["address"], Path(link["root-certificates"]).read_bytes(), token
