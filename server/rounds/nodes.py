"""Nodes as Flower knows them, and which of them each site belongs to."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

NONCE = "nonce"


def nonce() -> ConfigRecord:
    """Return a record that makes a message's id unguessable: a node that knows the id could answer the message."""
    return ConfigRecord({NONCE: secrets.token_hex(16)})


@dataclass(frozen=True)
class Node:
    """A connected node.

    `name`: the name that its key was registered under. `key`: the SHA-256 of that public key. Both are empty without
    authentication.
    """

    id: int
    name: str = ""
    key: str = ""


def nodes_of(grid: Grid) -> dict[int, Node]:
    """Return the connected nodes, by id."""
    return {node.node_id: Node(node.node_id, node.name, _digest(node)) for node in grid.get_nodes()}


def _digest(node: NodeInfo) -> str:
    """Return the digest of a registered node's key; unregistered nodes only have a temporary key."""
    return hashlib.sha256(node.public_key).hexdigest() if node.name and node.public_key else ""


@dataclass
class InMemoryBindings:
    """Which node and key each site's contributions belong to, as the ledger stores it, but as long as this object lasts."""

    nodes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def bound(self) -> dict[str, int]:
        return self.nodes

    def keys(self) -> dict[str, str]:
        return self.digests

    def bind(self, nodes: Mapping[str, int], by: str = "joined", keys: Mapping[str, str] | None = None) -> None:
        self.nodes |= nodes
        self.digests = {site: key for site, key in self.digests.items() if site not in nodes} | dict(keys or {})
