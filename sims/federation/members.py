"""Who may join: the nodes whose public keys lie in the server's folder, and no others. The SuperLink's list follows it."""

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
    """The files of public keys, and when each was last written. OSError if the folder cannot be read."""
    return {path.name: path.lstat().st_mtime_ns for path in folder.iterdir() if path.suffix == ".pub"}


def follow(state: SqlLinkState, folder: Path) -> None:
    """Let in the keys of the folder under the names of their files, also those that were thrown out; throw out all others.

    The id of each one's node is written beside its key.
    """
    wanted = _keys(folder)  # OSError: nobody is thrown out for a folder that cannot be read
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
        beside = path.with_suffix(ID)
        if not beside.is_file() or beside.read_text(encoding="ascii") != str(id):
            write_private(beside, str(id).encode())


def _keys(folder: Path) -> dict[bytes, Path]:
    """The keys of the folder's files, as Flower knows them. The log names what is not a key, or is another site's."""
    found: dict[bytes, Path] = {}
    for path in sorted(path for path in folder.iterdir() if path.suffix == ".pub"):
        try:
            public = load_ssh_public_key(read_small(path))
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            log.error("%s: cannot be read (%s); this site is not let in", path, error)
            continue
        if not isinstance(public, EllipticCurvePublicKey):
            log.error("%s: is not an ECDSA key; this site is not let in", path)
            continue
        key = public_key_to_bytes(public)
        if key in found:
            log.error("%s: is the key of %s, too; this site is not let in", path, found[key].stem)
            continue
        found[key] = path
    return found


def _let_in_again(state: SqlLinkState, key: bytes, name: str) -> None:
    """Flower takes no key a second time; its row says again that it may join."""
    again = {"status": NodeStatus.REGISTERED, "unregistered_at": None, "name": name, "owner_aid": NOOP_FLWR_AID}
    with state.session() as session:
        session.execute(update(Node).where(Node.public_key == key).values(**again))
