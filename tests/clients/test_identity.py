"""Signatures by a site's key: what was signed is known, what was changed or signed by another is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import TRAIN, TaskInstructions, to_arrays
from fedloom.clients.protocol.signatures import SIGNED, Identity, fingerprint, is_signed, update_payload, verified_signature
from fedloom.conf.errors import UserError
from tests.node_keys import write_node_key


def ordered(kind: str = TRAIN, secure: str = "") -> TaskInstructions:
    return TaskInstructions(config="", run="run", site=1, round=1, rounds=2, base=0, members=2, kind=kind, secure=secure)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """By site, the file of its private key, and its public one."""
    root, found = tmp_path_factory.mktemp("keys"), {}
    for name in ("a", "b"):
        (root / name).mkdir()
        found[name] = str(root / name / "key"), write_node_key(root / name)
    return found


@given(text=st.binary(max_size=200), noise=st.binary(max_size=120), place=st.integers(0, 199))
def test_a_signature_is_of_one_text_and_one_key(
    keys: dict[str, tuple[str, str]], text: bytes, noise: bytes, place: int
) -> None:
    signature = Identity(keys["a"][0]).signed(text)
    assert is_signed(keys["a"][1], text, signature)
    assert not is_signed(keys["b"][1], text, signature) and not is_signed(keys["a"][1], text + b" ", signature)
    assert not is_signed(keys["a"][1], text, noise) and not is_signed("ssh-rsa AAAA", text, signature)
    at = place % len(signature)
    changed = signature[:at] + bytes([signature[at] ^ 1]) + signature[at + 1 :]
    assert not is_signed(keys["a"][1], text, changed)


def test_a_word_travels_with_its_key(keys: dict[str, tuple[str, str]]) -> None:
    content = RecordDict({"site": to_arrays({"w": torch.ones(3)}), "metrics": MetricRecord({"loss": 1.0})})
    words = update_payload("run", "a", 3, content)
    word = Identity(keys["a"][0]).sign(*words)
    assert word is not None and Identity().sign(*words) is None
    content[SIGNED] = word
    found = verified_signature(content, *update_payload("run", "a", 3, content))
    assert found["key"] == " ".join(keys["a"][1].split()[:2]) and len(fingerprint(found["key"])) == 64
    for other in (("run", "b", 3), ("run", "a", 2), ("other", "a", 3)):
        assert verified_signature(content, *update_payload(*other, content)) == {}
    content["site"] = to_arrays({"w": torch.ones(3) * 2})
    assert verified_signature(content, *update_payload("run", "a", 3, content)) == {}
    odd: dict[str, Any]
    for odd in ({}, {"signature": "xyz", "key": "ssh"}, {"signature": [1], "key": 3.0}, {"signature": "00" * 9999}):
        content[SIGNED] = ConfigRecord(odd)
        assert verified_signature(content, *words) == {} and fingerprint("nonsense") == ""


def test_peers_are_known_by_the_file_as_it_is_now(keys: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    peers.write_text(f"a {keys['a'][1]}\n")
    one, signature = Identity(peers=str(peers)), Identity(keys["a"][0]).signed(b"text")
    one.check("a", b"text", signature)
    for site, text, word in (("b", b"text", signature), ("a", b"texts", signature), ("a", b"text", b"")):
        with pytest.raises(UserError, match=f"a statement in {site}'s name is not signed by its key"):
            one.check(site, text, word)
    Identity().check("anybody", b"text", b"")
    peers.write_text("nonsense\n")
    with pytest.raises(UserError, match="each line must be a site's name and its public key"):
        one.check("a", b"text", signature)
    with pytest.raises(UserError, match="does not contain a readable private key"):
        Identity(str(peers)).signed(b"")


def test_a_site_that_wants_masks_answers_nothing_else() -> None:
    policy = Policy.of({"masks": "required"})
    for kind in ("enrol", "evaluate", "secure_keys"):
        policy.check_secure_aggregation(ordered(kind=kind))
    policy.check_secure_aggregation(ordered(secure="00"))
    for order in (ordered(), ordered(kind="moments"), ordered(kind="anything", secure="00")):
        with pytest.raises(RefusedError, match="asks for more than sums"):
            policy.check_secure_aggregation(order)
    Policy().check_secure_aggregation(ordered())
    with pytest.raises(UserError, match="masks: got 'maybe', takes required"):
        Policy.of({"masks": "maybe"})
