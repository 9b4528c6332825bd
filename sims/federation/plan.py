"""A federation as folders, one for each machine: its keys, its sheet, and how it is started."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.typed import build, option
from fedloom.conf.yaml_text import write_yaml
from fedloom.sims.federation import sheets
from fedloom.sims.federation.files import read_small, write_private, write_together
from fedloom.sims.federation.keys import (
    AUTHORITY,
    CERTIFICATE,
    NODE_KEY,
    SERVER_KEY,
    NodeKey,
    public_key,
    write_certificates,
)
from fedloom.sims.federation.names import check_names
from fedloom.sims.federation.sheets import ServerSheet, SiteSheet

SERVER = "server"  # the folder of the server's machine
KEYS = "keys"  # in it: the public keys of the sites
FLOWER = "flwr"  # in it: what Flower's programs keep
ID = ".id"  # of the file beside a site's public key: the id of its node
JOINED = "joined"  # behind a public key: the site made it itself
PEERS = "peers"  # in a site's folder: all of them
IGNORE = ".gitignore"
MEMBERS = "members.yaml"  # in the server's folder: what all sites may know of each other and of the server
CONNECTION = "here"  # how Flower's configuration names the SuperLink
OWN = ("name", "superlink", "certificate", "key")  # keys of a site's sheet that the plan writes


@dataclass(frozen=True)
class Plan:
    """The whole federation, as `nodes.yaml` says it."""

    host: str = option("127.0.0.1", "the server's address, as the sites reach it")
    port: int = option(8000, "the SuperLink's", low=1, high=65535)
    tls: bool = option(True, "encrypted, the server known by its certificate and each site by its key")
    join: bool = option(False, "sites of other owners join with keys of their own; then `sites` may be empty")
    names: list[str] = option([], "further names and addresses of the server, for its certificate")
    sites: list[dict[str, Any]] = option([], "a section for each: name, and any other key of site.yaml", entries=SiteSheet)

    @property
    def local(self) -> bool:
        """Whether it is all on one machine."""
        return self.host in ("127.0.0.1", "localhost")


def site_sheets(plan: Plan) -> list[SiteSheet]:
    """Each site's sheet. UserError for none, names that are no folder's or are there twice, keys that the plan sets."""
    for key, given in (("host", plan.host), *((f"names[{place}]", name) for place, name in enumerate(plan.names))):
        if not sheets.is_address(given):
            raise UserError(f"{key}: got {given!r}, takes a machine's name or address alone, such as fed.example.org")
    if not plan.tls:
        raise UserError(
            "tls: false is not offered: without TLS whoever is on the way could be the server, or a site; leave it out"
        )
    if not (plan.sites or plan.join):
        raise UserError("sites: takes at least one, such as '- {name: site-0000}'")
    made: list[SiteSheet] = []
    for place, given in enumerate(plan.sites):
        if odd := next((key for key in OWN[1:] if key in given), ""):
            raise UserError(f"sites[{place}].{odd}: is what the plan itself says; leave it out")
        sheet = build(SiteSheet, given, f"sites[{place}]")
        if not (sheet.name.isascii() and is_name(sheet.name)):
            raise UserError(f"sites[{place}].name: got {sheet.name!r}, takes letters (a to z), digits, '-', '_' and '.'")
        if sheet.name == SERVER or any(sheet.name == one.name for one in made):
            raise UserError(f"sites[{place}].name: '{sheet.name}' is taken")
        check_names(sheet, f"sites[{place}].")
        own = {"certificate": AUTHORITY, "key": NODE_KEY, "peers": sheet.peers or PEERS}
        made.append(replace(sheet, superlink=f"{plan.host}:{plan.port}", **own))
    return made


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """The machines' folders, the server's first; where a federation is already, those of sites that are new to it.

    UserError if anything else is in the folder, there is no new site, or it cannot be written.
    """
    made = site_sheets(plan)
    with written(folder):
        if (folder / SERVER / sheets.SERVER).is_file():
            return _add_sites(plan, folder, made)
        if not _empty(folder):
            raise UserError(f"{folder}: is not empty; name another folder, or remove it with its keys")
        return _write_plan(plan, folder, made)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """What cannot be written below a folder becomes a UserError in one line."""
    try:
        yield
    except OSError as error:
        told = f"{error.filename or folder}: cannot be written ({error.strerror})"
        raise UserError(f"{told}; make room or mend permissions, or name another folder") from None


def _write_plan(plan: Plan, folder: Path, made: Sequence[SiteSheet]) -> list[Path]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / IGNORE, b"*\n")  # there are private keys in it
    with _made(folder / SERVER) as server:
        (server / KEYS).mkdir(mode=0o700)
        write_certificates(server, list(dict.fromkeys([plan.host, *plan.names, "localhost", "127.0.0.1"])))
        listen = "127.0.0.1" if plan.local else "0.0.0.0"
        sheets.write(server / sheets.SERVER, ServerSheet(superlink=f"{plan.host}:{plan.port}", host=listen, port=plan.port))
    return [folder / SERVER, *_write_sites(folder, made)]


@contextlib.contextmanager
def _made(home: Path) -> Iterator[Path]:
    """A machine's folder while it is filled: it has its own name once it is complete, in an unfinished one's place."""
    hidden = home.with_name(f".{home.name}.new")
    for old in (hidden, home):
        if old.is_dir():
            shutil.rmtree(old)
    hidden.mkdir(mode=0o700)
    yield hidden
    hidden.rename(home)


def _unfinished(home: Path) -> bool:
    """Whether nothing is in a folder but what a plan writes there, and its sheet is not: the plan was killed."""
    names = {path.name for path in home.iterdir()} if home.is_dir() else {home.name}
    ours = {AUTHORITY, CERTIFICATE, SERVER_KEY, KEYS, NODE_KEY, f"{NODE_KEY}.pub"}
    rekeyed = NODE_KEY in names and AUTHORITY not in names
    return names <= ours and not rekeyed and not any(home.glob(f"{KEYS}/*"))


def _empty(folder: Path) -> bool:
    """Whether nothing is in a folder but what a plan leaves that was killed before its server's folder was complete."""
    if not folder.exists():
        return True
    left = (folder / IGNORE, folder / f".{SERVER}.new")
    return all(path in left or (path == folder / SERVER and _unfinished(path)) for path in folder.iterdir())


def _add_sites(plan: Plan, folder: Path, made: Sequence[SiteSheet]) -> list[Path]:
    if (address := f"{plan.host}:{plan.port}") != (there := sheets.read_server(folder / SERVER).superlink):
        now = f"the server {there}, not {address}"
        raise UserError(f"{folder}: is a federation with {now}; say the same host and port, or name another folder")
    there, keys = sites_of(folder), [path.stem for path in (folder / SERVER / KEYS).glob("*.pub")]
    left = [name for name in there if name not in keys and not (folder / name / PEERS).exists()]  # by a plan that was killed
    taken = {*there, *(name for name in keys if not _unfinished(folder / name))}
    for name in left:
        _let_in(folder, name)
    if not (new := [sheet for sheet in made if sheet.name not in taken]) and not left:
        write_public(folder)
        raise UserError(f"{folder}: is not empty, and has all of these sites; add one to the plan, or name another folder")
    return _write_sites(folder, new)


def _write_sites(folder: Path, made: Sequence[SiteSheet]) -> list[Path]:
    for sheet in made:
        home = folder / sheet.name
        if home.exists() and not _unfinished(home):
            raise UserError(f"{home}: is there already, and is not a site's folder; name the site otherwise, or remove it")
    for sheet in made:
        with _made(folder / sheet.name) as home:
            certificate = {home / AUTHORITY: (folder / SERVER / AUTHORITY).read_bytes()}
            write_together({**certificate, **NodeKey().files(home), home / sheets.SITE: sheets.text(sheet)})
        _let_in(folder, sheet.name)
    write_public(folder)
    return [folder / sheet.name for sheet in made]


def _let_in(folder: Path, name: str) -> None:
    """Write the public key in a site's folder where the server finds it."""
    write_private(folder / SERVER / KEYS / f"{name}.pub", read_small(folder / name / f"{NODE_KEY}.pub"))


def write_public(folder: Path) -> None:
    """What sites may know of each other, after their keys in the server's folder: each one's peers, where its folder is
    here, and a file for those that are elsewhere."""
    server = server_of(folder)
    known = members(server)
    for name in sites_of(folder):
        write_private(folder / name / PEERS, peers_text(known).encode("ascii"))
    given = {
        "superlink": sheets.read_server(server).superlink,
        "certificate": (server / AUTHORITY).read_text(encoding="ascii"),
        "sites": known,
    }
    write_private(server / MEMBERS, write_yaml(given).encode())


def members(server: Path) -> dict[str, str]:
    """The sites whose public keys lie in a server's folder, and the keys."""
    found = {}
    for path in sorted((server / KEYS).glob("*.pub")):
        try:
            found[path.stem] = public_key(read_small(path).decode("ascii"))
        except (OSError, UnicodeDecodeError, UserError) as error:
            told = (error.strerror if isinstance(error, OSError) else "") or error
            raise UserError(f"{path}: {told}; put the site's key.pub there, or delete it") from None
    return found


def peers_text(known: Mapping[str, str]) -> str:
    """The file by which a site knows the others: a line for each, NAME KEY."""
    return "".join(f"{name} {key}\n" for name, key in known.items())


def server_of(folder: Path) -> Path:
    """The server's folder: in this one, or this one itself."""
    return folder if (folder / sheets.SERVER).is_file() else folder / SERVER


def machines_of(folder: Path) -> list[Path]:
    """The machines' folders in this one, the server's first, or this one itself if it is one. UserError if there is none."""
    if not (found := _machines(folder)):
        raise UserError(f"{folder}: is no federation's folder, nor a machine's; 'fedloom federation up {folder}' makes one")
    return found


def holds_machines(folder: Path) -> bool:
    """Whether it is a federation's folder, or a machine's."""
    return bool(_machines(folder))


def _machines(folder: Path) -> list[Path]:
    homes = (folder / SERVER, *(folder / name for name in sites_of(folder)), folder)
    return [home for home in homes if (home / sheets.SERVER).is_file() or (home / sheets.SITE).is_file()]


def sites_of(folder: Path) -> list[str]:
    """The sites whose folders are on this machine."""
    return sorted(path.parent.name for path in folder.glob(f"[!.]*/{sheets.SITE}"))


def is_name(name: str) -> bool:
    """Whether a site may be called so: its folder and its files are."""
    return 0 < len(name) <= sheets.MOST_NAME and not name.startswith(".") and all(c.isalnum() or c in "-_." for c in name)
