"""Nodes as Flower knows them, and to which of them each site belongs."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flwr.app import ConfigRecord
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

NONCE = "nonce"


def nonce() -> ConfigRecord:
    """What makes a message's id, which is a hash of it, unguessable: any node that knows the id can answer the message."""
    return ConfigRecord({NONCE: secrets.token_hex(16)})


@dataclass(frozen=True)
class Node:
    """A node that is there. `name`: the one that its key was registered under; `key`: the SHA-256 of that public key;
    both empty where nodes are not authenticated."""

    id: int
    name: str = ""
    key: str = ""


def nodes_of(grid: Grid) -> dict[int, Node]:
    """The nodes that are there, by id."""
    return {node.node_id: Node(node.node_id, node.name, _digest(node)) for node in grid.get_nodes()}


def _digest(node: NodeInfo) -> str:
    """Of a registered node's key: to nodes that are not registered Flower gives keys for a day."""
    return hashlib.sha256(node.public_key).hexdigest() if node.name and node.public_key else ""


class Bindings(Protocol):
    """Which node and which key each site's contributions belong to, kept for good: the ledger does."""

    def bound(self) -> dict[str, int]:
        """Node ids by site."""
        ...

    def keys(self) -> dict[str, str]:
        """Digests of public keys by site, of those that joined with one."""
        ...

    def bind(self, nodes: Mapping[str, int], by: str = "joined", keys: Mapping[str, str] | None = None) -> None:
        """From now on each site is at this node, with this key or none."""
        ...


@dataclass
class InMemoryBindings:
    """Bindings that last as long as this object."""

    nodes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def bound(self) -> dict[str, int]:
        """As Bindings says."""
        return self.nodes

    def keys(self) -> dict[str, str]:
        """As Bindings says."""
        return self.digests

    def bind(self, nodes: Mapping[str, int], by: str = "joined", keys: Mapping[str, str] | None = None) -> None:
        """As Bindings says."""
        self.nodes |= nodes
        self.digests = {site: key for site, key in self.digests.items() if site not in nodes} | dict(keys or {})
