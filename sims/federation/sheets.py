"""Read and write the settings of a federation's machines: `site.yaml` and `server.yaml`, which their owners edit."""

import contextlib
import dataclasses
import hashlib
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
from fedloom.conf.sites import is_site_name
from fedloom.conf.text_keys import keep_texts
from fedloom.conf.typed import at_home, build, option
from fedloom.conf.yaml_text import read_yaml, write_yaml
from fedloom.sims.federation.files import write_private
from fedloom.sims.federation.keys import check_pair

SITE, SERVER = "site.yaml", "server.yaml"
NODE_CONFIG = "node.toml"  # written when a node starts
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
    "compile",
    "largest_order",
    "masks",
    "epsilon",
    "disclose",
)  # keys that a node-config has as well (clients.privacy.policy)
LIMITS = (
    "min_members",
    "min_known",
    "min_batch",
    "max_steps",
    "max_parameters",
    "max_store",
)  # as above; -1: the default there
MOST_NAME = 100  # characters

T = TypeVar("T")


@dataclass(frozen=True)
class SiteSheet:
    """The settings of a site: its name, its server, and what it allows the server. Paths are relative to the file."""

    name: str = option("", "the site's name, as in the configurations of runs")
    superlink: str = option("", "the server's address, HOST:PORT")
    certificate: str = option("", "the authority's certificate, which identifies the server; empty: no TLS", path=True)
    key: str = option("", "the site's private key, which identifies it to the server; empty: no authentication", path=True)
    store: str = option("store", "folder for the site's data of runs", path=True)
    port: int = option(0, "port of the node's program, for this machine only; 0: any free port", low=0, high=65535)
    data: str = option("", "folder with the data sets; empty: $FEDLOOM_DATA, else ./data", path=True)
    domain: str = option(
        "", "the site's own data instead of the configuration's: images:FOLDER, table:FILE, module:function, ..."
    )
    networks: list[str] = option([], "allowed networks; empty: all shipped ones")
    objectives: list[str] = option([], "allowed objectives; empty: all shipped ones")
    optimizers: list[str] = option([], "allowed optimisers; empty: all shipped ones")
    strategies: list[str] = option([], "allowed strategies; empty: any")
    publish: list[str] = option(
        [],
        "parts of the site's network that others may receive; [none]: no part; empty: any part",
        choices=("extractor", "head", "none"),
    )
    device: str = option("", "device for training; empty: as in the run", choices=("", "auto", "cpu", "cuda"))
    gpu: float = option(1.0, "largest share of a GPU's memory", low=0.01, high=1.0)
    compile: bool = option(False, "run torch's compiler if the run says so (engine.compile)")
    largest_order: float = option(0.0, "MB of the largest message that it accepts; 0: 1,000", low=0.0)
    masks: str = option(
        "", "required: what it trains leaves the site only under secure aggregation", choices=("", "required")
    )
    epsilon: float = option(
        0.0,
        "privacy budget of all rounds (delta at most 1e-5); refuses training without noise; 0: no limit",
        low=0.0,
    )
    disclose: list[str] = option(
        [],
        "scores: losses and accuracies, also under masks or noise; classes: correct answers by class",
        choices=("scores", "classes"),
    )
    min_members: int = option(-1, "fewest sites of a masked sum; -1: more than half of `peers`, 3 without them", low=-1)
    min_known: int = option(-1, "fewest of these sites with a key in `peers`; -1: min_members if masks are required", low=-1)
    min_batch: int = option(
        -1, "fewest images in a batch; a smaller last batch is left out; -1: 8 with masks or epsilon, else 1", low=-1
    )
    max_steps: int = option(100_000, "most training steps in a round; 0: no limit", low=0)
    max_parameters: float = option(500.0, "millions of weights of the largest network that it trains; 0: no limit", low=0.0)
    max_memory: float = option(0.0, "GB of memory of each of its programs, at least 1; 0: 3/4 of the machine's", low=0.0)
    max_store: float = option(20.0, "GB on disk in `store`, above which it does not train; 0: no limit", low=0.0)
    peers: str = option("", "file with the public keys of the sites to share masks with; empty: any site", path=True)
    apps: str = option(
        "",
        "any: runs the code that the server sends, with all rights of this user; empty: runs the installed app",
        choices=("", "any"),
    )
    warm: bool = option(True, "keep a process with all imports ready: saves seconds for each message, needs about 400 MB")
    environment: dict[str, str] = option({}, "environment variables of the node, such as CUDA_VISIBLE_DEVICES: '0'")


@dataclass(frozen=True)
class ServerSheet:
    """The settings of the server's SuperLink. Paths are relative to the file."""

    superlink: str = option("", "its address for the sites, HOST:PORT")
    host: str = option("127.0.0.1", "address to listen at, for nodes only; 0.0.0.0: all addresses of the machine")
    port: int = option(8000, "port to listen at, for nodes only; runs use another port, on loopback", low=1, high=65535)
    certificate: str = option("server.crt", "the server's certificate", path=True)
    key: str = option("server.key", "its private key", path=True)
    authority: str = option("ca.crt", "the authority's certificate", path=True)


def read_server(folder: Path) -> ServerSheet:
    """Return the settings in a server's folder. Raises UserError for damaged or old ones, or missing keys."""
    path = folder / SERVER
    section = _section(ServerSheet, path)
    if "authenticate" in section or not section.get("superlink"):
        raise UserError(f"{path}: is from an earlier version, whose server obeyed anyone who reached its port, so its keys "
                        "may be known to others. Plan again into a new folder ('fedloom federation plan', 'up'), "
                        "copy the new folders to the machines, and delete this one")  # fmt: skip
    sheet = read(ServerSheet, path)
    for key in ("certificate", "key", "authority"):
        if not (name := getattr(sheet, key)) or not (folder / name).is_file():
            raise UserError(f"{path}: {key}: the file {folder / name} is missing; restore it from the plan, or plan again")
    check_pair(folder / sheet.certificate, folder / sheet.key, folder / sheet.authority)
    return sheet


def _section(schema: type[Any], path: Path) -> Mapping[str, Any]:
    """Return the keys in a file, with texts where the schema has them. Raises UserError for a file without keys."""
    try:
        section = read_yaml(path.read_text(encoding="utf-8"), lambda node: keep_texts(schema, node)) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(section, Mapping):
        raise UserError(f"{path}: takes keys with values, such as 'name: site-0000'")
    return section


def read(schema: type[T], path: Path) -> T:
    """Return a machine's settings (`schema`) in a YAML file. Raises UserError if it is missing or has anything else."""
    section = _section(schema, path)
    try:
        sheet = at_home(build(schema, section))
        check_texts(sheet)
        return sheet
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def check_texts(sheet: Any, where: str = "") -> None:
    """Raise UserError for a text in settings that cannot be printed, or cannot be a variable of the environment."""
    for field in dataclasses.fields(sheet):
        _check_text(f"{where}{field.name}", getattr(sheet, field.name))


def _check_text(key: str, content: object) -> None:
    """Raise UserError for a text, also in a list or section, that cannot be a name or an environment variable."""
    if isinstance(content, dict):
        for name, text in content.items():
            if not name or not str(name).isprintable() or "=" in str(name):
                raise UserError(f"{key}: '{plain(str(name))[:MOST_NAME]}' cannot be the name of a variable; remove '='")
            if not isinstance(text, str):
                raise UserError(f"{key}.{name}: got {plain(str(text))[:MOST_NAME]}, takes a text")
            _check_text(f"{key}.{name}", text)
    for entry in content if isinstance(content, list) else [content]:
        if isinstance(entry, str) and not entry.isprintable():
            raise UserError(f"{key}: '{plain(entry)[:MOST_NAME]}' has a character that cannot be printed; remove it")


def write(path: Path, sheet: Any) -> None:
    """Write a machine's settings to a file."""
    write_private(path, text(sheet))


def text(sheet: Any) -> bytes:
    """Return a machine's settings as YAML, with the meaning of each key. Keys with their default are comments."""
    lines = []
    for field in dataclasses.fields(sheet):
        setting = getattr(sheet, field.name)
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        line = write_yaml({field.name: setting}).strip() if setting or setting == default else f"{field.name}: {setting}"
        lines.append(f"{'# ' if setting == default else ''}{line}  # {field.metadata['help']}")
    return ("\n".join(lines) + "\n").encode()


def is_address(text: str) -> bool:
    """Return whether a text is a machine's name or address, without a port."""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text)) and re.fullmatch(r"[0-9A-Za-z.:%_-]+", text) is not None
    parts = text.removesuffix(".").split(".")
    return len(text) < 254 and all(re.fullmatch(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", part) for part in parts)


def check_superlink(address: str) -> None:
    """Raise UserError unless the address is HOST:PORT."""
    host, _, port = address.rpartition(":")
    good = is_address(host.removeprefix("[").removesuffix("]")) and re.fullmatch("[0-9]{1,5}", port)
    if not (good and 0 < int(port) < 2**16):
        raise UserError(f"superlink: got '{plain(address)[:MOST_NAME]}', takes HOST:PORT, such as fed.example.org:8000")


def node_config(sheet: SiteSheet, folder: Path) -> str:
    """Return the TOML that Flower's SuperNode passes to the ClientApp (clients.privacy.policy, clients.storage.store)."""
    if not sheet.name or len(sheet.name) > MOST_NAME:
        raise UserError(f"{folder / SITE}: name: takes 1 to {MOST_NAME} characters, got {sheet.name[:20]!r}")
    if not is_site_name(sheet.name):
        raise UserError(f"{folder / SITE}: name: got {sheet.name!r}, takes letters, digits, '-', '_' and '.'")
    settings: dict[str, Any] = {"site": sheet.name, "store": str((folder / sheet.store).resolve())}
    for key in POLICY:
        setting = getattr(sheet, key)
        if setting:
            settings[key] = ",".join(setting) if isinstance(setting, list) else setting
    settings |= {key: getattr(sheet, key) for key in LIMITS if getattr(sheet, key) >= 0}
    settings |= {name: str((folder / file).resolve()) for name, file in
              {"identity": sheet.key, "peers": sheet.peers}.items() if file}  # fmt: skip
    config = f"{_mark(sheet)}\n{tomli_w.dumps(settings)}"
    assert tomllib.loads(config) == settings
    return config


def _mark(sheet: SiteSheet) -> str:
    """Return a comment that identifies all settings of a site, also those that are not in its node-config."""
    return f"# {SITE}: {hashlib.sha256(text(sheet)).hexdigest()}"


def is_outdated(folder: Path) -> bool:
    """Return whether a node that runs in the folder uses other settings than the site's file has now."""
    try:
        began = (folder / NODE_CONFIG).read_text(encoding="utf-8").splitlines()[:1]
        if not began or not began[0].startswith("#"):  # an earlier version started it
            return False
        return began[0] != _mark(read(SiteSheet, folder / SITE))
    except OSError:
        return False
    except UserError:
        return True
