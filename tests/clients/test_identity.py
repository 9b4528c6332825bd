"""Signatures by a site's key: what was signed is known, what was changed or signed by another is not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.identity import Identity, is_signed
from clients.messages import TRAIN, Order
from clients.policy import Policy, RefusedError
from conf.errors import UserError
from sims.federation.keys import write_node_key


def ordered(kind: str = TRAIN, secure: str = "") -> Order:
    return Order(config="", run="run", site=1, round=1, rounds=2, base=0, members=2, kind=kind, secure=secure)


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


def test_peers_are_known_by_the_file_as_it_is_now(keys: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    peers.write_text(f"a {keys['a'][1]}\n")
    one, signature = Identity(peers=str(peers)), Identity(keys["a"][0]).signed(b"text")
    one.check("a", b"text", signature)
    for site, text, word in (("b", b"text", signature), ("a", b"texts", signature), ("a", b"text", b"")):
        with pytest.raises(UserError, match=f"said to be {site}'s word is not signed by its key"):
            one.check(site, text, word)
    Identity().check("anybody", b"text", b"")
    peers.write_text("nonsense\n")
    with pytest.raises(UserError, match="takes lines of a site's name and its public key"):
        one.check("a", b"text", signature)
    with pytest.raises(UserError, match="holds no private key"):
        Identity(str(peers)).signed(b"")


def test_a_site_that_wants_masks_answers_nothing_else() -> None:
    policy = Policy.of({"masks": "required"})
    for kind in ("enrol", "evaluate", "secure_keys"):
        policy.hide(ordered(kind=kind))
    policy.hide(ordered(secure="00"))
    for order in (ordered(), ordered(kind="moments"), ordered(kind="anything", secure="00")):
        with pytest.raises(RefusedError, match="asks for more than sums"):
            policy.hide(order)
    Policy().hide(ordered())
    with pytest.raises(UserError, match="masks: got 'maybe', takes required"):
        Policy.of({"masks": "maybe"})
