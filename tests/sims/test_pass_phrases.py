"""A private key with a pass phrase is one line of text, wherever a key is read. The desk's: test_desk_hosts.py."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.clients.protocol.signatures import Identity
from fedloom.conf.errors import UserError
from fedloom.server.unlearning.signing import VARIABLE, operator_key
from fedloom.sims.federation import keys
from tests.sims.commands import Command, refused
from tests.sims.desks import certificate


def locked_key(folder: Path, kind: str) -> Path:
    """A key in OpenSSH's format, whose pass phrase is `abcdef`."""
    words = ["ssh-keygen", "-q", "-t", *kind.split(), "-N", "abcdef", "-f", str(folder / "key")]
    subprocess.run(words, check=True, timeout=60)
    return folder / "key"


def test_the_operators_key(fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(locked_key(tmp_path, "ed25519")))
    with pytest.raises(UserError, match="key: has a pass phrase"):
        operator_key()
    refused(fedloom("key"), f"{tmp_path / 'key'}: has a pass phrase, and Fedloom does not ask for it")


@pytest.mark.parametrize("read", [keys.check_private, lambda path: Identity(str(path)).signed(b"text")])
def test_a_sites_key(tmp_path: Path, read: Callable[[Path], object]):
    path = locked_key(tmp_path, "ecdsa -b 384")
    with pytest.raises(UserError, match=r"key: has a pass phrase.*ssh-keygen -p -f"):
        read(path)


def test_the_servers_key(tmp_path: Path):
    cert, key = certificate(tmp_path, phrase="abcdef")
    with pytest.raises(UserError, match=r"key\.pem: has a pass phrase.*openssl pkey -in"):
        keys.check_pair(cert, key, cert)
