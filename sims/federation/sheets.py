"""What a machine of a federation runs, as files that its owner reads and changes: `site.yaml` and `server.yaml`."""

import contextlib
import dataclasses
import ipaddress
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import yaml

from fedloom.conf.errors import UserError, plain
from fedloom.conf.text_keys import keep_texts
from fedloom.conf.typed import at_home, build, option
from fedloom.conf.yaml_text import read_yaml, write_yaml
from fedloom.sims.federation.files import write_private
from fedloom.sims.federation.keys import check_pair

SITE, SERVER = "site.yaml", "server.yaml"
POLICY = (
    "data",
    "domain",
    "networks",
    "objectives",
    "optimizers",
    "strategies",
    "publish",
    "device",
    "gpu",
    "largest_order",
    "masks",
    "epsilon",
    "disclose",
)  # keys that a node-config has, too (clients.privacy.policy)
LIMITS = ("min_members", "min_known", "min_batch", "max_steps", "max_parameters")  # the same; -1: as there
MOST_NAME = 100  # letters

T = TypeVar("T")


@dataclass(frozen=True)
class SiteSheet:
    """One site: who it is, where the server is, what it lets a server do with it. Paths are relative to the file."""

    name: str = option("", "the site's name, as in the configurations of runs")
    superlink: str = option("", "the server's address, HOST:PORT")
    certificate: str = option("", "the authority's certificate, by which the server is known; empty: no TLS", path=True)
    key: str = option("", "the site's private key, by which the server knows it; empty: no authentication", path=True)
    store: str = option("store", "folder of what the site keeps of runs", path=True)
    port: int = option(0, "of the node's own program, on this machine alone; 0: any that is free", low=0, high=65535)
    data: str = option("", "folder with its data sets; empty: $FEDLOOM_DATA, else ./data", path=True)
    domain: str = option("", "its own images in place of the configuration's: images:FOLDER, npz:FILE, module:function, ...")
    networks: list[str] = option([], "networks that it runs; none: all that ship")
    objectives: list[str] = option([], "objectives that it runs; none: all that ship")
    optimizers: list[str] = option([], "optimisers that it runs; none: all that ship")
    strategies: list[str] = option([], "strategies of runs that it takes part in; none: any")
    publish: list[str] = option(
        [], "parts of its network that others may have; [none]: none; empty: any", choices=("extractor", "head", "none")
    )
    device: str = option("", "where it computes; empty: as the run says", choices=("", "auto", "cpu", "cuda"))
    gpu: float = option(1.0, "share of a GPU's memory that it may take", low=0.0, high=1.0)
    largest_order: float = option(0.0, "MB of the largest message that it works on; 0: 1,000", low=0.0)
    masks: str = option("", "required: what it trains leaves it under secure aggregation only", choices=("", "required"))
    epsilon: float = option(
        0.0,
        "what all its rounds may cost of its privacy (delta 1e-5 or less); what is not noised it refuses; 0: any",
        low=0.0,
    )
    disclose: list[str] = option(
        [],
        "scores: losses and accuracies, also under masks or noise; classes: right answers by class",
        choices=("scores", "classes"),
    )
    min_members: int = option(-1, "fewest sites of a masked sum; -1: more than half of `peers`, 3 without them", low=-1)
    min_known: int = option(-1, "fewest of them whose keys are in `peers`; -1: as min_members if masks are required", low=-1)
    min_batch: int = option(
        -1, "fewest images of a batch; the rest of a pass is left out; -1: 8 with masks or epsilon, else 1", low=-1
    )
    max_steps: int = option(100_000, "most training steps of a round; 0: any", low=0)
    max_parameters: float = option(500.0, "millions of weights of the largest network that it trains; 0: any", low=0.0)
    peers: str = option(
        "", "file of all sites' public keys, by which it knows with whom it shares masks; empty: any", path=True
    )
    apps: str = option(
        "",
        "any: it runs what a server sends, with all that its user may do; empty: the app installed here",
        choices=("", "any"),
    )
    warm: bool = option(True, "a process that has all imported waits for orders: saves seconds of each, takes some 400 MB")
    environment: dict[str, str] = option({}, "environment variables of the node, such as CUDA_VISIBLE_DEVICES: '0'")


@dataclass(frozen=True)
class ServerSheet:
    """The server: its SuperLink. Paths are relative to the file."""

    superlink: str = option("", "its address as the sites reach it, HOST:PORT")
    host: str = option("127.0.0.1", "address to listen at, for nodes alone; 0.0.0.0: all of the machine's")
    port: int = option(8000, "to listen at, for nodes alone; runs are started at another, on loopback", low=1, high=65535)
    certificate: str = option("server.crt", "the server's certificate", path=True)
    key: str = option("server.key", "its private key", path=True)
    authority: str = option("ca.crt", "the authority's certificate", path=True)


def read_server(folder: Path) -> ServerSheet:
    """The sheet of a server's folder. UserError as `read`, and for one of an earlier version, or without certificates."""
    path = folder / SERVER
    given = _given(ServerSheet, path)
    if "authenticate" in given or not given.get("superlink"):
        raise UserError(f"{path}: was planned by an earlier version, whose server obeyed whoever reached its port: its keys "
                        "may be known to others. Plan again into a new folder ('fedloom federation plan', 'up'), "
                        "copy the new folders to the machines, and delete this one")  # fmt: skip
    sheet = read(ServerSheet, path)
    for key in ("certificate", "key", "authority"):
        if not (name := getattr(sheet, key)) or not (folder / name).is_file():
            raise UserError(f"{path}: {key}: there is no file {folder / name}; put it back from the plan, or plan again")
    check_pair(folder / sheet.certificate, folder / sheet.key, folder / sheet.authority)
    return sheet


def _given(schema: type[Any], path: Path) -> Mapping[str, Any]:
    """The section of keys in a file, texts as the schema has them. UserError if it is missing or holds something else."""
    try:
        given = read_yaml(path.read_text(encoding="utf-8"), lambda node: keep_texts(schema, node)) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(given, Mapping):
        raise UserError(f"{path}: takes a section of keys, such as 'name: site-0000'")
    return given


def read(schema: type[T], path: Path) -> T:
    """The sheet in a file. UserError for one that is not there or holds something else."""
    given = _given(schema, path)
    try:
        found = at_home(build(schema, given))
        for one in dataclasses.fields(found):  # type: ignore[arg-type]
            _check_text(one.name, getattr(found, one.name))
        return found
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_text(key: str, given: object) -> None:
    """UserError for a text in a list or section that no name or environment variable can be."""
    if isinstance(given, dict):
        for name, text in given.items():
            if not name or not str(name).isprintable() or "=" in str(name):
                raise UserError(f"{key}: '{plain(str(name))[:MOST_NAME]}' cannot be the name of a variable; take out '='")
            _check_text(f"{key}.{name}", text)
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str) and not one.isprintable():
            raise UserError(f"{key}: '{plain(one)[:MOST_NAME]}' has a character that cannot be printed; take it out")


def write(path: Path, sheet: Any) -> None:
    """Write a sheet to its file."""
    write_private(path, text(sheet))


def text(sheet: Any) -> bytes:
    """A sheet as YAML, each key's meaning behind it; what has its default is left out as a comment."""
    lines = []
    for one in dataclasses.fields(sheet):
        given = getattr(sheet, one.name)
        default = one.default if one.default is not dataclasses.MISSING else one.default_factory()  # type: ignore[misc]
        line = write_yaml({one.name: given}).strip() if given or given == default else f"{one.name}: {given}"
        lines.append(f"{'# ' if given == default else ''}{line}  # {one.metadata['help']}")
    return ("\n".join(lines) + "\n").encode()


def is_address(given: str) -> bool:
    """Whether a text is a machine's name or address, without a port."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(given)) and re.fullmatch(r"[0-9A-Za-z.:%_-]+", given) is not None
    parts = given.removesuffix(".").split(".")
    return len(given) < 254 and all(re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", part) for part in parts)


def check_superlink(given: str) -> None:
    """UserError for anything but HOST:PORT."""
    host, _, port = given.rpartition(":")
    good = is_address(host.removeprefix("[").removesuffix("]")) and re.fullmatch("[0-9]{1,5}", port)
    if not (good and 0 < int(port) < 2**16):
        raise UserError(f"superlink: got '{plain(given)[:MOST_NAME]}', takes HOST:PORT, such as fed.example.org:8000")


def node_config(sheet: SiteSheet, folder: Path) -> str:
    """The TOML that Flower's SuperNode passes to the ClientApp (clients.privacy.policy, clients.storage.store)."""
    if not sheet.name or len(sheet.name) > MOST_NAME:
        raise UserError(f"{folder / SITE}: name: takes 1 to {MOST_NAME} letters, got {sheet.name[:20]!r}")
    given: dict[str, Any] = {"site": sheet.name, "store": str((folder / sheet.store).resolve())}
    for key in POLICY:
        one = getattr(sheet, key)
        if one:
            given[key] = ",".join(one) if isinstance(one, list) else one
    given |= {key: getattr(sheet, key) for key in LIMITS if getattr(sheet, key) >= 0}
    given |= {name: str((folder / file).resolve()) for name, file in
              {"identity": sheet.key, "peers": sheet.peers}.items() if file}  # fmt: skip
    text = tomli_w.dumps(given)
    assert tomllib.loads(text) == given
    return text
