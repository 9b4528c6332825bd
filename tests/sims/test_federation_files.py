"""Files of a federation's machines that are damaged, swapped, linked, another user's, or too long."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.conf.errors import UserError
from fedloom.sims.federation import programs
from fedloom.sims.federation.keys import AUTHORITY, CERTIFICATE, NODE_KEY, SERVER_KEY
from fedloom.sims.federation.plan import MEMBERS, PEERS, Plan, write_plan
from fedloom.sims.federation.programs import LOG, OLD_LOG, bound, free_port, lock_away
from fedloom.sims.federation.sheets import SERVER, SITE, check_superlink, read_server
from tests.sims.commands import Command, refused


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """A server's folder and a site's."""
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "fed")
    return tmp_path / "fed"


def damage(path: Path) -> None:
    path.write_bytes(os.urandom(300))


def swap(path: Path) -> None:
    """Another file of the same folder in its place."""
    shutil.copyfile(path.with_name(SITE if path.with_name(SITE).is_file() else SERVER), path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize("spoil", [damage, swap, cut])
@pytest.mark.parametrize("name", [NODE_KEY, AUTHORITY])
def test_a_sites_file_that_is_not_what_it_should_be(
    fedloom: Command, federation: Path, name: str, spoil: Callable[[Path], None]
):
    spoil(federation / "a" / name)
    refused(fedloom("federation", "node", federation / "a" / SITE), str(federation / "a" / name), "is not a")


@pytest.mark.parametrize("line", ["data: nowhere", "domain: images:nowhere", "domain: 'table:nowhere?target=y'"])
def test_data_that_are_not_there_are_found_before_the_node_starts(fedloom: Command, federation: Path, line: str):
    sheet = federation / "a" / SITE
    text = sheet.read_text()
    sheet.write_text(f"{text}{line}\n")
    refused(
        fedloom("federation", "node", sheet),
        f"{sheet}: {line[: line.index(':')]}: {sheet.parent / 'nowhere'} does not exist",
    )


@pytest.mark.parametrize("spoil", [damage, swap, cut])
@pytest.mark.parametrize("name", [CERTIFICATE, SERVER_KEY, AUTHORITY])
def test_a_servers_file_that_is_not_what_it_should_be(
    fedloom: Command, federation: Path, name: str, spoil: Callable[[Path], None]
):
    spoil(federation / "server" / name)
    refused(fedloom("federation", "server", federation / "server"), str(federation / "server" / name), "is not a")


def test_a_servers_certificate_goes_with_its_key_and_authority(fedloom: Command, federation: Path, tmp_path: Path):
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "other")
    for name, message in ((SERVER_KEY, "is not the certificate of the key"), (AUTHORITY, "is not from the authority")):
        before = (federation / "server" / name).read_bytes()
        shutil.copyfile(tmp_path / "other" / "server" / name, federation / "server" / name)
        refused(fedloom("federation", "server", federation / "server"), message)
        (federation / "server" / name).write_bytes(before)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('environment: {"A=B": x}', "environment: 'A=B' cannot be the name of a variable"),
        ('environment: {"": x}', "environment: '' cannot be the name of a variable"),
        ('environment: {A: "b\\0"}', "environment.A: 'b"),
        ('store: "a\\0b"', "store: got 'a"),
        ('name: "a\\nb"', "name: got 'a"),
        ('networks: ["a\\nb"]', "networks"),
        ("superlink: fed.example.org:٨٠٠٠", "superlink: got"),
        ('superlink: "fe80::1%a b:8000"', "superlink: got"),
    ],
)
def test_a_text_of_a_sheet_that_can_be_nothing(fedloom: Command, federation: Path, line: str, message: str):
    sheet = federation / "a" / SITE
    key = line.split(":")[0]
    rest = [one for one in sheet.read_text().splitlines() if not one.startswith(key)]
    sheet.write_text("\n".join([*rest, line]), encoding="utf-8")
    refused(fedloom("federation", "node", sheet), str(sheet), message)


USELESS = {  # line of a sheet: message
    "publish: [none, head]": "publish: got [none, head]",
    "environment: {A: [1]}": "environment.A: got ['1'], takes a text",
    "store: key.pub": "store: ",
    "store: /": "store: got '/'",
    "store: ../a": "store: ",
    "store: ../server": "store: ",
    "min_known: 2": "min_known: got 2, but `peers` has the keys of 1 sites",
    "min_members: 2": "min_members: got 2, but `peers` has the keys of 1 sites",
    "peers: site.yaml": "site.yaml: is not a list of sites and their keys",
    "peers: key": "key: is not a list of sites and their keys",
    "peers: doubled": "doubled: is not a list of sites and their keys",
    "domain: npz:/etc/passwd": "domain: /etc/passwd is not an npz file",
    "domain: images:/etc/passwd": "domain: /etc/passwd is not a folder",
    "domain: table:/etc?target=x": "domain: /etc is not a file",
    "data: /etc/passwd": "data: /etc/passwd is not a folder",
    "port: SERVER": "is the server's port",
    "port: TAKEN": "is not available (Address already in use)",
}


@pytest.mark.parametrize("line", USELESS)
def test_a_sheet_with_which_the_node_could_do_nothing(fedloom: Command, federation: Path, line: str):
    sheet = federation / "a" / SITE
    (federation / "a" / "doubled").write_text((federation / "a" / PEERS).read_text() * 2)
    lines = [one for one in sheet.read_text().splitlines() if not one.startswith(line.split(":")[0])]
    server = read_server(federation / "server").port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line, message = line.replace("SERVER", str(server)).replace("TAKEN", str(taken.getsockname()[1])), USELESS[line]
        sheet.write_text("\n".join([*lines, line]))
        refused(fedloom("federation", "node", sheet), str(sheet.parent), message)


@pytest.mark.parametrize("given", ["a\n:8000", "a:80\n", "fe80::1%\x1b[2J:8000", "[::1]x:8000", "a:99999", "a:²"])
def test_an_address_from_elsewhere_has_no_strange_letters(given: str):
    with pytest.raises(UserError, match="takes HOST:PORT") as error:
        check_superlink(given)
    assert str(error.value).isprintable()


def test_a_plan_says_the_servers_fingerprint(fedloom: Command, tmp_path: Path):
    (tmp_path / "nodes.yaml").write_text("sites: [{name: a}]")
    said = fedloom("federation", "plan", tmp_path / "nodes.yaml", "--folder", tmp_path / "new")
    assert said.code == 0 and "SHA256:" in said.out and (tmp_path / "new" / "server" / MEMBERS).is_file()
    assert (tmp_path / "new" / "a" / PEERS).is_file()


def test_a_link_is_not_locked_away(fedloom: Command, tmp_path: Path):
    (tmp_path / "there").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    refused(fedloom("federation", "join", "a", "--superlink", "x:1", "--folder", tmp_path / "link"), "is a link")
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o755 and not list((tmp_path / "there").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_not_locked_away(tmp_path: Path):
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(UserError, match="belongs to user 12345"):
        lock_away(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "MOST_LOG", 1000)
    with (tmp_path / LOG).open("ab", buffering=0) as file:
        for number in range(100):
            file.write(f"line {number} {'x' * 50}\n".encode())
            bound(tmp_path / LOG)
    found = [(tmp_path / name).read_text() for name in (OLD_LOG, LOG)]
    assert all(0 < len(text) < 1100 for text in found) and "line 99 " in found[1]
