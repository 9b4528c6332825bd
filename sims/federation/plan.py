"""Write a federation as folders, one for each machine, with its keys and its sheet."""

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from fedloom.sims.federation.names import check_names, check_numbers
from fedloom.sims.federation.sheets import ServerSheet, SiteSheet

SERVER = "server"  # the folder of the server's machine
KEYS = "keys"  # in it: the public keys of the sites
FLOWER = "flwr"  # in it: the files of Flower's programs
ID = ".id"  # suffix of the file next to a public key, with the id of the site's node
JOINED = "joined"  # comment of a public key that the site made itself
PEERS = "peers"  # in a site's folder: the public keys of all sites
IGNORE = ".gitignore"
MEMBERS = "members.yaml"  # in the server's folder: the server's certificate and the keys of all sites, for the sites
CONNECTION = "here"  # the name of the SuperLink in Flower's configuration
OWN = ("name", "superlink", "certificate", "key")  # keys of a site's sheet that only the plan sets


@dataclass(frozen=True)
class Plan:
    """The settings of a whole federation, as in `nodes.yaml`."""

    host: str = option("127.0.0.1", "the server's address, for the sites")
    port: int = option(8000, "the SuperLink's port", low=1, high=65535)
    tls: bool = option(True, "encrypted; a certificate identifies the server, a key each site")
    join: bool = option(False, "sites of other owners join with their own keys; then `sites` may be empty")
    names: list[str] = option([], "more names and addresses of the server, for its certificate")
    sites: list[dict[str, Any]] = option(
        [], "a section for each site: its name, and any other key of site.yaml", entries=SiteSheet
    )

    @property
    def local(self) -> bool:
        """Whether the whole federation is on one machine."""
        return self.host in ("127.0.0.1", "localhost")


def site_sheets(plan: Plan) -> list[SiteSheet]:
    """Return the settings (site.yaml) of each site. Raises UserError for a plan without sites, or an invalid key."""
    for key, address in (("host", plan.host), *((f"names[{index}]", name) for index, name in enumerate(plan.names))):
        if not sheets.is_address(address):
            raise UserError(
                f"{key}: got {address!r}, takes a machine's name or address without a port, such as fed.example.org"
            )
    if not plan.tls:
        raise UserError(
            "tls: false is not possible: without TLS, anyone on the network could pose as the server or a site; leave it out"
        )
    if not (plan.sites or plan.join):
        raise UserError("sites: takes at least one, such as '- {name: site-0000}'")
    planned: list[SiteSheet] = []
    for index, section in enumerate(plan.sites):
        if odd := next((key for key in OWN[1:] if key in section), ""):
            raise UserError(f"sites[{index}].{odd}: is set by the plan; leave it out")
        sheet = build(SiteSheet, section, f"sites[{index}]")
        if not (sheet.name.isascii() and is_name(sheet.name)):
            raise UserError(f"sites[{index}].name: got {sheet.name!r}, takes letters (a to z), digits, '-', '_' and '.'")
        if other := nearly(sheet.name, [SERVER, *(other.name for other in planned)]):
            raise UserError(f"sites[{index}].name: '{sheet.name}' is taken{_by(sheet.name, other)}; choose another name")
        sheets.check_texts(sheet, f"sites[{index}].")
        check_names(sheet, f"sites[{index}].")
        if plan.local and sheet.port in (plan.port, *(other.port for other in planned if other.port)):
            raise UserError(f"sites[{index}].port: {sheet.port} is another machine's of this plan; use 0 or another port")
        own = {"certificate": AUTHORITY, "key": NODE_KEY, "peers": sheet.peers or PEERS}
        planned.append(replace(sheet, superlink=f"{plan.host}:{plan.port}", **own))
    return planned


def nearly(name: str, others: Iterable[str]) -> str:
    """Return the first of other names that differs from `name` in upper and lower case only, or not at all; else nothing."""
    return next((other for other in others if name.casefold() == other.casefold()), "")


def _by(name: str, other: str) -> str:
    return "" if name == other else f" by '{other}', which differs in upper and lower case only"


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Write the folders of all machines, or of new sites if `folder` has a federation. Return them, the server's first.

    Raises UserError if the folder contains anything else, no site is new, or a file cannot be written.
    """
    planned = site_sheets(plan)
    known = {sheet.name for sheet in planned} | {path.stem for path in (folder / SERVER / KEYS).glob("*.pub")}
    for index, sheet in enumerate(planned):
        if sheet.peers == PEERS and not plan.join:
            check_numbers(sheet, len(known), f"sites[{index}].")
    with written(folder):
        if (folder / SERVER / sheets.SERVER).is_file():
            return _add_sites(plan, folder, planned)
        if not _empty(folder):
            raise UserError(f"{folder}: is not empty; name another folder, or remove this one with its keys")
        return _write_plan(plan, folder, planned)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """Turn an OSError from writing below a folder into a UserError."""
    try:
        yield
    except OSError as error:
        fault = f"{error.filename or folder}: cannot be written ({error.strerror})"
        raise UserError(f"{fault}; free some space, change the permissions, or name another folder") from None


def _write_plan(plan: Plan, folder: Path, planned: Sequence[SiteSheet]) -> list[Path]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(folder / IGNORE, b"*\n")  # the folder contains private keys
    with _filled(folder / SERVER) as server:
        (server / KEYS).mkdir(mode=0o700)
        write_certificates(server, list(dict.fromkeys([plan.host, *plan.names, "localhost", "127.0.0.1"])))
        listen = "127.0.0.1" if plan.local else "0.0.0.0"
        sheets.write(server / sheets.SERVER, ServerSheet(superlink=f"{plan.host}:{plan.port}", host=listen, port=plan.port))
    return [folder / SERVER, *_write_sites(folder, planned)]


@contextlib.contextmanager
def _filled(home: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill, and rename it to `home` when it is complete. Replaces an unfinished folder."""
    hidden = home.with_name(f".{home.name}.new")
    for old in (hidden, home):
        if old.is_dir():
            shutil.rmtree(old)
    hidden.mkdir(mode=0o700)
    yield hidden
    hidden.rename(home)


def _unfinished(home: Path) -> bool:
    """Return whether a killed plan left this folder: it has files of a plan alone, and no sheet."""
    names = {path.name for path in home.iterdir()} if home.is_dir() else {home.name}
    ours = {AUTHORITY, CERTIFICATE, SERVER_KEY, KEYS, NODE_KEY, f"{NODE_KEY}.pub"}
    rekeyed = NODE_KEY in names and AUTHORITY not in names
    return names <= ours and not rekeyed and not any(home.glob(f"{KEYS}/*"))


def _empty(folder: Path) -> bool:
    """Return whether a folder is empty, or has only the first files of a plan that was killed."""
    if not folder.exists():
        return True
    left = (folder / IGNORE, folder / f".{SERVER}.new")
    return all(path in left or (path == folder / SERVER and _unfinished(path)) for path in folder.iterdir())


def _add_sites(plan: Plan, folder: Path, planned: Sequence[SiteSheet]) -> list[Path]:
    if (address := f"{plan.host}:{plan.port}") != (current := sheets.read_server(folder / SERVER).superlink):
        servers = f"the server {current}, not {address}"
        raise UserError(f"{folder}: is a federation with {servers}; use the same host and port, or name another folder")
    existing, keys = sites_of(folder), [path.stem for path in (folder / SERVER / KEYS).glob("*.pub")]
    left = [name for name in existing if name not in keys and not (folder / name / PEERS).exists()]  # from a killed plan
    taken = {*existing, *(name for name in keys if not _unfinished(folder / name))}
    for name in left:
        _copy_key(folder, name)
    new = [sheet for sheet in planned if sheet.name not in taken]
    for sheet in new:
        if other := nearly(sheet.name, taken):
            raise UserError(f"sites: '{sheet.name}' is taken{_by(sheet.name, other)} in {folder}; choose another name")
    if not new and not left:
        write_public(folder)
        raise UserError(f"{folder}: already has all sites of the plan; add a site to the plan, or name another folder"
                        + "".join(f". {line}" for line in unlike_plan(plan, folder)))  # fmt: skip
    return _write_sites(folder, new)


def unlike_plan(plan: Plan, folder: Path) -> list[str]:
    """Return how the folders of existing sites differ from a plan, which never changes them: a line for each site."""
    planned = {sheet.name: sheet for sheet in site_sheets(plan)}
    return [line for name in sites_of(folder) if (line := _unlike(folder, name, planned.get(name)))]


def _unlike(folder: Path, name: str, planned: SiteSheet | None) -> str:
    """Return how a site differs from the plan; empty if it does not, or if its sheet cannot be read."""
    if planned is None:
        return f"{name} is not in the plan, but stays a member; to exclude it, delete {folder / SERVER / KEYS / name}.pub"
    path = folder / name / sheets.SITE
    try:
        sheet = sheets.read(SiteSheet, path)
    except UserError:
        return ""  # the node says what is wrong
    keys = [key.name for key in fields(sheet) if getattr(sheet, key.name) != getattr(planned, key.name)]
    return f"{path} differs from the plan in {', '.join(keys)}; change it there, and restart the node" if keys else ""


def _write_sites(folder: Path, planned: Sequence[SiteSheet]) -> list[Path]:
    for sheet in planned:
        home = folder / sheet.name
        if home.exists() and not _unfinished(home):
            raise UserError(
                f"{home}: exists already, and is not a site's folder; choose another name for the site, or remove the folder"
            )
    for sheet in planned:
        with _filled(folder / sheet.name) as home:
            certificate = {home / AUTHORITY: (folder / SERVER / AUTHORITY).read_bytes()}
            write_together({**certificate, **NodeKey().files(home), home / sheets.SITE: sheets.text(sheet)})
        _copy_key(folder, sheet.name)
    write_public(folder)
    return [folder / sheet.name for sheet in planned]


def _copy_key(folder: Path, name: str) -> None:
    """Copy a site's public key to the server's folder."""
    write_private(folder / SERVER / KEYS / f"{name}.pub", read_small(folder / name / f"{NODE_KEY}.pub"))


def write_public(folder: Path) -> None:
    """Write all sites' public keys to the files for sites: `peers` in their folders here, and the members' file."""
    server = server_of(folder)
    known = members(server)
    for name in sites_of(folder):
        write_private(folder / name / PEERS, peers_text(known).encode("ascii"))
    content = {
        "superlink": sheets.read_server(server).superlink,
        "certificate": (server / AUTHORITY).read_text(encoding="ascii"),
        "sites": known,
    }
    write_private(server / MEMBERS, write_yaml(content).encode())


def members(server: Path) -> dict[str, str]:
    """Return the public keys in a server's folder, by site. Raises UserError for an unreadable one."""
    known = {}
    for path in sorted((server / KEYS).glob("*.pub")):
        try:
            known[path.stem] = public_key(read_small(path).decode("ascii"))
        except (OSError, UnicodeDecodeError, UserError) as error:
            fault = (error.strerror if isinstance(error, OSError) else "") or error
            raise UserError(f"{path}: {fault}; replace it with the site's key.pub, or delete it") from None
    return known


def peers_text(known: Mapping[str, str]) -> str:
    """Return the content of a site's file of peers: a line NAME KEY for each site."""
    return "".join(f"{name} {key}\n" for name, key in known.items())


def server_of(folder: Path) -> Path:
    """Return the server's folder: inside `folder`, or `folder` itself."""
    return folder if (folder / sheets.SERVER).is_file() else folder / SERVER


def machines_of(folder: Path) -> list[Path]:
    """Return the machines' folders in `folder`, the server's first, or `folder` itself. Raises UserError without any."""
    if not (homes := _machines(folder)):
        raise UserError(
            f"{folder}: is not the folder of a federation or a machine; make one: 'fedloom federation up {folder}'"
        )
    return homes


def holds_machines(folder: Path) -> bool:
    """Return whether this is the folder of a federation or of a machine."""
    return bool(_machines(folder))


def _machines(folder: Path) -> list[Path]:
    homes = (folder / SERVER, *(folder / name for name in sites_of(folder)), folder)
    return [home for home in homes if (home / sheets.SERVER).is_file() or (home / sheets.SITE).is_file()]


def sites_of(folder: Path) -> list[str]:
    """Return the sorted names of the sites that have a folder in `folder`."""
    return sorted(path.parent.name for path in folder.glob(f"[!.]*/{sheets.SITE}"))


def is_name(name: str) -> bool:
    """Return whether this can be the name of a site, and so of its folder and files."""
    return 0 < len(name) <= sheets.MOST_NAME and not name.startswith(".") and all(c.isalnum() or c in "-_." for c in name)
