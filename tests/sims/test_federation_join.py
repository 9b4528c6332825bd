"""Sites that make their own keys: join, admit, accept; what is refused, and what each side sees before it agrees."""

import subprocess
from pathlib import Path

import pytest

from fedloom.conf.yaml_text import read_yaml, write_yaml
from fedloom.sims.federation.keys import fingerprint
from fedloom.sims.federation.plan import members
from fedloom.sims.federation.sheets import SITE, SiteSheet, read
from tests.node_keys import write_node_key
from tests.sims.commands import Command, refused

LINK = ("--superlink", "127.0.0.1:8000")


@pytest.fixture
def operator(fedloom: Command, tmp_path: Path) -> Path:
    """The folder of a server that has no sites yet."""
    (tmp_path / "nodes.yaml").write_text("join: true")
    assert fedloom("federation", "plan", tmp_path / "nodes.yaml", "--folder", tmp_path / "m").code == 0
    return tmp_path / "m"


def joined(fedloom: Command, operator: Path, name: str) -> Path:
    """A site that was let in."""
    home = operator.parent / name
    assert fedloom("federation", "join", name, *LINK, "--folder", home).code == 0
    said = fedloom("federation", "admit", home / "join.request", "--folder", operator, "--yes")
    assert said.code == 0, said
    return home


def test_a_site_makes_its_own_key_and_all_learn_each_others(fedloom: Command, operator: Path):
    north, file = operator.parent / "north", operator / "server" / "members.yaml"
    said = fedloom("federation", "join", "north", *LINK, "--folder", north)
    public = (north / "key.pub").read_text()
    output = subprocess.run(["ssh-keygen", "-lf", north / "key.pub"], capture_output=True, text=True)
    assert said.code == 0 and f"north {fingerprint(public)}" in said.out
    assert output.returncode or output.stdout.split()[1] == fingerprint(public)
    assert (north / "key").stat().st_mode & 0o077 == 0 and north.stat().st_mode & 0o077 == 0
    asked = ("federation", "admit", north / "join.request", "--folder", operator)
    refused(fedloom(*asked), "admit: stdin is not a terminal, so no one can answer; nothing is changed")
    refused(fedloom(*asked, "--fingerprint", "SHA256:other"), "its key does not have this fingerprint")
    assert not members(operator / "server")
    assert fedloom(*asked, "--fingerprint", fingerprint(public)).code == 0
    assert members(operator / "server") == {"north": public.strip()}
    assert not any("PRIVATE" in path.read_text() for path in [file, north / "join.request"])
    south = joined(fedloom, operator, "south")
    for home in (north, south):
        refused(fedloom("federation", "node", home / SITE), "is missing", "'fedloom federation accept' copies it")
        refused(fedloom("federation", "accept", file, "--folder", home), "accept: stdin is not a terminal")
        said = fedloom("federation", "accept", file, "--folder", home, "--yes")
        assert said.code == 0 and said.out.count("new") >= 3
        assert fingerprint(public).replace("SHA256:", "")[:20] in said.out.replace("\n", "")
    assert (north / "peers").read_text() == (south / "peers").read_text()
    assert [line.split()[0] for line in (north / "peers").read_text().splitlines()] == ["north", "south"]
    assert read(SiteSheet, north / SITE).peers == "peers"


def test_a_key_that_changes_is_seen_by_all(fedloom: Command, operator: Path):
    north, south = joined(fedloom, operator, "north"), joined(fedloom, operator, "south")
    file = operator / "server" / "members.yaml"
    assert fedloom("federation", "accept", file, "--folder", north, "--yes").code == 0
    refused(fedloom("federation", "join", "south", *LINK, "--folder", south), "exists already; --rekey replaces it")
    old = (south / "key").read_bytes()
    assert fedloom("federation", "join", "south", "--rekey", "--folder", south).code == 0
    assert (south / "key").read_bytes() != old
    asked = ("federation", "admit", south / "join.request", "--folder", operator, "--yes")
    refused(fedloom(*asked), "south: is a member with another key, SHA256:", "--rekey replaces it")
    refused(fedloom("federation", "rekey", "south", "--folder", operator), "south: makes its own keys")
    refused(
        fedloom("federation", "accept", file, "--folder", south, "--yes"), "is not in the members' file with this site's key"
    )
    assert fedloom(*asked, "--rekey").code == 0
    said = fedloom("federation", "accept", file, "--folder", north, "--yes")
    assert "ANOTHER KEY than" in " ".join(said.out.split()) and "unchanged" in " ".join(said.out.split())
    assert (south / "key.pub").read_text().strip() in (north / "peers").read_text()


def test_a_request_that_is_not_its_own_is_refused(fedloom: Command, operator: Path):
    home = joined(fedloom, operator, "north")
    request, asked = home / "join.request", ("federation", "admit", "--folder", operator, "--yes")
    given = read_yaml(request.read_text())
    other = operator.parent / "other"
    other.mkdir()
    key = write_node_key(other)
    for altered, message in [
        ({**given, "name": "south"}, "is not signed by the key in it"),
        ({**given, "key": key}, "is not signed by the key in it"),
        ({**given, "signature": "zz"}, "is not signed by the key in it"),
        ({**given, "name": "../away"}, "takes letters (a to z)"),
        ({**given, "name": "server"}, "takes letters (a to z)"),
        ({**given, "name": ["north"]}, "is not a site's request"),
        ({**given, "key": "ssh-rsa AAAA"}, "is not a public key"),
        ({**given, "key": "x" * 5000}, "is not a site's request"),
        ({"name": "north"}, "is not a site's request"),
        ([1], "is not a site's request"),
        ("x" * 20_000, "is not a site's request"),
    ]:
        (operator.parent / "altered").write_text(write_yaml(altered))
        refused(fedloom(*asked, operator.parent / "altered"), message)
    (operator.parent / "altered").write_bytes(b"\xff\xfe{")
    refused(fedloom(*asked, operator.parent / "altered"), "cannot be read")
    refused(fedloom(*asked, operator.parent / "nowhere"), "cannot be read")
    assert fedloom("federation", "join", "North", *LINK, "--folder", operator.parent / "n2").code == 0
    refused(fedloom(*asked, operator.parent / "n2" / "join.request"), "a member has almost the same name")
    refused(fedloom(*asked, request, "--folder", other), "server.yaml: cannot be read")


def test_a_key_is_one_sites_alone(fedloom: Command, operator: Path):
    """A site that asks a second time under another name, with the same key."""
    from fedloom.clients.protocol.signatures import Identity, signing_payload

    home = joined(fedloom, operator, "north")
    key = (home / "key.pub").read_text().strip()
    signature = Identity(str(home / "key")).signed(signing_payload("join", "south", key)).hex()
    (operator.parent / "again").write_text(write_yaml({"name": "south", "key": key, "signature": signature}))
    message = "south: north has the same key"
    refused(fedloom("federation", "admit", operator.parent / "again", "--folder", operator, "--yes"), message)


def test_a_members_file_is_not_believed_blindly(fedloom: Command, operator: Path):
    north = joined(fedloom, operator, "north")
    file, other = operator / "server" / "members.yaml", operator.parent / "other.yaml"
    given = read_yaml(file.read_text())
    take = ("federation", "accept", other, "--folder", north, "--yes")
    for altered, message in [
        ({**given, "sites": {}}, "north: is not in the members' file"),
        ({**given, "certificate": "x"}, "certificate: cannot be read"),
        ({**given, "certificate": 2 * given["certificate"]}, "certificate: cannot be read"),
        ({**given, "superlink": "http://x"}, "takes HOST:PORT"),
        ({**given, "sites": {"../x": given["sites"]["north"]}}, "takes letters (a to z)"),
        ({**given, "sites": {**given["sites"], "x y": "z"}}, "takes letters (a to z)"),
        ({**given, "sites": {**given["sites"], "south": given["sites"]["north"]}}, "two sites have the same key"),
        ({**given, "sites": {"north": "line\nbreak x"}}, "is not a public key"),
        ({}, "is not a members' file"),
    ]:
        other.write_text(write_yaml(altered))
        refused(fedloom(*take), message)
    assert not (north / "peers").exists() and not (north / "ca.crt").exists()
    other.write_text(write_yaml({**given, "superlink": "127.0.0.1:9000"}))
    assert "stays" in " ".join(fedloom(*take).out.split())
    assert read(SiteSheet, north / SITE).superlink == "127.0.0.1:8000"


def test_joining_says_what_it_takes(fedloom: Command, tmp_path: Path):
    refused(fedloom("federation", "join", "a b", *LINK, "--folder", tmp_path / "a"), "NAME: got 'a b', takes letters")
    refused(fedloom("federation", "join", "a", "--folder", tmp_path / "a"), "superlink: got '', takes HOST:PORT")
    assert not (tmp_path / "a").exists()
    assert fedloom("federation", "join", "a", *LINK, "--folder", tmp_path / "a").code == 0
    refused(fedloom("federation", "join", "b", *LINK, "--rekey", "--folder", tmp_path / "a"), "belongs to another site")
