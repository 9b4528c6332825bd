"""Admit exactly the nodes whose public keys are in the server's folder, and update the SuperLink's list."""

import logging
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.state.schema.linkstate_models import Node
from sqlalchemy import update

from fedloom.sims.federation.files import read_small, write_private
from fedloom.sims.federation.plan import ID

log = logging.getLogger("flwr")


def seen(folder: Path) -> dict[str, int]:
    """Return, by file name, when each public key changed (ns). Raises OSError if the folder cannot be read."""
    return {path.name: path.lstat().st_mtime_ns for path in folder.iterdir() if path.suffix == ".pub"}


def follow(state: SqlLinkState, folder: Path) -> None:
    """Admit exactly the nodes with keys in the folder, under their files' names, to the SuperLink; remove all others.

    Admits keys again that were removed. Writes the id of each node to a file next to its key.
    """
    wanted = _keys(folder)  # an OSError ends this before any node is removed
    known = {bytes(node.public_key): node for node in state.get_node_info()}
    for key, node in known.items():
        if key not in wanted and node.status != NodeStatus.UNREGISTERED:
            state.delete_node(node.owner_aid, node.node_id)
    for key, path in wanted.items():
        node = known.get(key)
        if node is None:
            id = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=path.stem)
        else:
            id = node.node_id
            if node.status == NodeStatus.UNREGISTERED or node.name != path.stem:
                _let_in_again(state, key, path.stem)
        id_file = path.with_suffix(ID)
        if not id_file.is_file() or id_file.read_text(encoding="ascii") != str(id):
            write_private(id_file, str(id).encode())


def _keys(folder: Path) -> dict[bytes, Path]:
    """Return the keys in the folder, in Flower's format. Logs files that are not keys or repeat another site's key."""
    files: dict[bytes, Path] = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix == ".pub"):
        try:
            public = load_ssh_public_key(read_small(path))
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            log.error("%s: cannot be read (%s); this site is not admitted", path, error)
            continue
        if not isinstance(public, EllipticCurvePublicKey):
            log.error("%s: is not an ECDSA key; this site is not admitted", path)
            continue
        key = public_key_to_bytes(public)
        if key in files:
            log.error("%s: has the same key as %s; this site is not admitted", path, files[key].stem)
            continue
        files[key] = path
    return files


def _let_in_again(state: SqlLinkState, key: bytes, name: str) -> None:
    """Admit a removed key again by changing its row, since Flower refuses a key that it has seen before."""
    again = {"status": NodeStatus.REGISTERED, "unregistered_at": None, "name": name, "owner_aid": NOOP_FLWR_AID}
    with state.session() as session:
        session.execute(update(Node).where(Node.public_key == key).values(**again))
