"""Keys of nodes for tests."""

from pathlib import Path

from fedloom.sims.federation.files import write_together
from fedloom.sims.federation.keys import NodeKey


def write_node_key(folder: Path) -> str:
    """Write a new key into a site's folder, and return the public half as a line."""
    key = NodeKey()
    write_together(key.files(folder))
    return key.line
