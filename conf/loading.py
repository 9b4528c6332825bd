"""Read an experiment's YAML, merge presets and overrides into it, and validate the result."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedloom.conf.errors import UserError, for_python, plain, say_dropped, unknown
from fedloom.conf.machine import uncollected
from fedloom.conf.schema import Config
from fedloom.conf.shorthand import NAMED, expand_shorthand, forget_options, is_set, named_section, opened_at, value_at
from fedloom.conf.suggestions import with_suggestion
from fedloom.conf.text_keys import keep_texts, keep_texts_at, values_kept_at
from fedloom.conf.typed import UnknownKeyError, at_home, build, checked
from fedloom.conf.values import shortened, words_in
from fedloom.conf.yaml_text import read_yaml, write_yaml

FOLDER = Path(__file__).parent
MOST_RUN_NAME_BYTES = 200
MANY = 100  # sites
STAR = re.compile(r"(^|[\[,:])\s*\*")  # a text that begins with a star
MOST_CHARACTERS = 100  # characters of an override in an error

VERSION = 8  # of `to_yaml`'s text. Raise it when a key is added, removed or changes its meaning. No version means 1


def experiment_names() -> list[str]:
    """Return the names of the shipped experiments: the YAML files in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def experiment_lines() -> dict[str, str]:
    """Return {name: description} of the shipped experiments. The description is the comment in a file's first line."""
    first = {name: (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0] for name in experiment_names()}
    return {name: line.lstrip("# ") for name, line in first.items()}


def has_preset(experiment: str, preset: str) -> bool:
    """Return whether a shipped experiment has a preset of this name."""
    return experiment in experiment_names() and preset in _tree_of(_text(_find(experiment)), experiment).get("presets", {})


@for_python
def load(experiment: str | os.PathLike[str], *overrides: str | Sequence[str]) -> Config:
    """Return the validated configuration of an experiment, which `run` takes.

    Args:
        experiment: The name of a shipped experiment, or the path of a YAML file.
        overrides: Texts `key=value`, or a list of them. `preset=NAME` selects one of the file's `presets`,
            `preset=[NAME, NAME]` several. Presets are merged in this order, before the other overrides.

    Raises:
        UserError: Unknown experiment, unreadable YAML, unknown key, wrong type, or value out of range.
    """
    if not isinstance(experiment, str | os.PathLike):
        raise UserError(f"experiment: got {shortened(experiment)}, takes a name such as 'digits' or the path of a YAML file")
    path = _find(os.fspath(experiment))
    words = [word for entry in overrides for word in words_in(entry)]
    return load_text(_text(path), path.stem, words, str(path), is_shipped(experiment))


def is_shipped(experiment: str | os.PathLike[str]) -> bool:
    """Return whether an experiment is one of this package, by name or by path, so that no setting in it is the user's."""
    name = os.fspath(experiment)
    return name in experiment_names() or Path(name).expanduser().resolve().parent == FOLDER.resolve()


def read_values(text: str) -> tuple[str, list[Any]]:
    """Return (key, values) of a text `key=value,value` or `key=[value,value]`. Each value is read as `load` reads it.

    Raises UserError for any other text.
    """
    key, _, items = text.partition("=")
    if not (key and items.strip()):
        raise UserError(f"'{_short(text)}': takes the form key=value,value, such as training.rate=0.01,0.03")
    values = _value(f"{key}=[{items}]", key, f"[{items}]", many=True)
    inner = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if not inner:
        raise UserError(f"'{_short(text)}': has no values; it takes key=value,value, such as training.rate=0.01,0.03")
    return key, inner


def read_override(text: str) -> Any:
    """Return the value in `key=value`, as `load` reads it. Raise UserError for any other text."""
    return next(iter(_parse([text]).values()))


@uncollected()
def load_text(
    text: str, name: str, overrides: Sequence[str] = (), where: str = "experiment", shipped: bool | Config = False
) -> Config:
    """Return the configuration of the YAML text of experiment `name`, as `load` does.

    `where`: its file, for errors. `shipped`: no setting in the text is the user's, so no warning names one; or a
    configuration, of which this is so for the settings that it has too.
    """
    tree = expand_shorthand(Config, _tree_of(text, where))
    changes = {key: opened_at(Config, key, item) for key, item in _parse(overrides).items()}
    presets = [expand_shorthand(Config, preset) for preset in _presets(tree, changes, name)]
    aside = _plain_sites(tree, [*changes, *(key for preset in presets for key in preset)])
    try:
        merged: Any = OmegaConf.create(tree)
        for preset in presets:
            for key, item in preset.items():
                forget_options(merged, str(key), item)
            merged = OmegaConf.merge(merged, OmegaConf.create(preset))
        ordered = list(_options_last(changes))
        for number, (key, item) in enumerate(ordered):
            _check_indices(merged, key)
            _open_name(merged, key)
            again = dict(ordered[number + 1 :])
            old = OmegaConf.to_container(merged) if named_section(key, item) else {}
            dropped = [name for name in forget_options(merged, key, item) if name not in again]
            dropped = [name for name in dropped if is_set(ordered[:number], name) or not _is_of(shipped, name, old)]
            if dropped and named_section(key, item):
                say_dropped(_short(key if key.endswith(".name") else f"{key}.name"), dropped)
            OmegaConf.update(merged, key, item, merge=_mergeable(OmegaConf.select(merged, key), item), force_add=True)
        resolved = OmegaConf.to_container(merged, resolve=True)
    except UserError:
        raise
    except (OmegaConfBaseException, TypeError, LookupError, ValueError, RecursionError) as error:
        words, key = " ".join([name, *map(_short, overrides)]), getattr(error, "full_key", "")  # of an interpolation
        raise UserError(": ".join(filter(None, [words, key, _first_line(error)]))) from None
    assert isinstance(resolved, dict)
    if {**resolved, **aside}.get("sites") is None and (other := resolved.get("experiment")) in experiment_names():
        raise UserError(f"experiment: nothing is inherited from '{other}', and `sites` is missing; write all keys, or "
                        f"name the experiment with changed keys as texts: run('{other}', 'rounds=2')")  # fmt: skip
    return from_mapping({"experiment": name, **aside, **{str(key): item for key, item in resolved.items()}})


def _is_of(shipped: bool | Config, name: str, tree: Any) -> bool:
    """Return whether the setting `name` of a configuration's tree is that of a shipped experiment."""
    return shipped if isinstance(shipped, bool) else value_at(dataclasses.asdict(shipped), name) == value_at(tree, name)


def _options_last(changes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the overrides in their order. Options of a partition before its name are repeated after it."""
    before: list[tuple[str, Any]] = []
    for key, item in changes.items():
        yield key, item
        if key.endswith(".partition.name"):
            yield from [override for override in before if override[0].startswith(key.removesuffix("name"))]
        before.append((key, item))


def _check_indices(merged: Any, key: str) -> None:
    """Raise UserError for a key that is not a valid index of the list that it leads into."""
    parts = key.split(".")
    for number, part in enumerate(parts[1:], 1):
        above = ".".join(parts[:number])
        if not OmegaConf.is_list(entries := OmegaConf.select(merged, above)):
            continue
        if not part.isdecimal():
            raise UserError(
                f"override '{_short(key)}': {above} is a list; name an entry, such as {above}.0, or set the whole list"
            )
        if int(part) >= len(entries):
            raise UserError(f"override '{_short(key)}': {above} has {len(entries)} entries, counted from 0")


def _open_name(merged: Any, key: str) -> None:
    """Turn a name in place of a section (`optimizer: adamw`) into a section, so that an option can be set in it."""
    section = key.rpartition(".")[0]
    if section.rpartition(".")[2] in NAMED and isinstance(name := OmegaConf.select(merged, section), str):
        OmegaConf.update(merged, section, {"name": name}, merge=False)


def _mergeable(current: Any, item: Any) -> bool:
    """Return whether a value can be merged into the existing one; otherwise it replaces the existing one."""
    return OmegaConf.is_list(current) == isinstance(item, list) and OmegaConf.is_dict(current) == isinstance(item, dict)


def _presets(tree: dict[str, Any], changes: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Remove the presets from the tree and the overrides, and return the selected ones in order."""
    presets, asked = tree.pop("presets", None) or {}, tree.pop("preset", None)
    asked = changes.pop("preset", asked)
    for key, section in presets.items() if isinstance(presets, Mapping) else ():
        if not isinstance(key, str):
            raise UserError(f"presets: got the name {key!r}, takes texts; put it in quotes")
        if not isinstance(section, Mapping):
            raise UserError(f"presets.{key}: got {section!r}, takes a section of keys")
    if asked is None:
        return []
    if not (presets and isinstance(presets, Mapping)):
        raise UserError(f"preset: {name} has no presets")
    names = asked if isinstance(asked, list) else [asked]
    for preset in names:
        if not isinstance(preset, str) or preset not in presets:
            raise unknown(f"preset of {name}", preset, presets)
    return [dict(presets[preset]) for preset in names]


def _plain_sites(tree: dict[str, Any], changes: Sequence[Any]) -> dict[str, Any]:
    """Remove a long list of sites without overrides and interpolations from the tree, and return it: OmegaConf is slow."""
    sites = tree.get("sites")
    if not isinstance(sites, list) or len(sites) < MANY or any(str(key).startswith("sites") for key in changes):
        return {}
    return {} if "${" in str(tree) else {"sites": tree.pop("sites")}


@uncollected()
def from_mapping(tree: Mapping[str, Any]) -> Config:
    """Return the validated Config of a plain mapping (YAML or JSON). `run.name` defaults to the experiment's name.

    A mapping of an earlier version lacks newer keys; their defaults are the earlier behaviour. Raise UserError as `load`.
    """
    filled = dict(tree)
    _check_version(filled.pop("version", 1))
    run = {} if filled.get("run") is None else filled["run"]
    if isinstance(run, Mapping) and run.get("name") in (None, ""):
        filled["run"] = {**run, "name": filled.get("experiment", "")}
    try:
        config = at_home(_built(filled))
        if not _names_a_folder(config.run.name):
            takes = f"takes a plain folder name of at most {MOST_RUN_NAME_BYTES} bytes"
            raise UserError(f"run.name: got '{_short(config.run.name)}', {takes}; set its parent in run.root")
        _ = config.roster  # raises an error for wrong sites
    except UnknownKeyError as error:
        raise with_suggestion(error) from None
    return config


def _built(tree: dict[str, Any]) -> Config:
    sites = tree.pop("sites", None)
    if isinstance(sites, list) and len(sites) >= MANY:  # unchanged: the roster checks every entry
        return dataclasses.replace(build(Config, tree), sites=checked(sites, "sites"))
    return build(Config, tree if sites is None else {**tree, "sites": sites})


def _check_version(version: Any) -> None:
    """Raise UserError for a configuration from a newer version of fedloom."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise UserError(f"version: got {version!r}, takes a number from 1 to {VERSION}")
    if version > VERSION:
        raise UserError(f"version: got {version}, this fedloom reads up to {VERSION}; use the fedloom that wrote it")


def _names_a_folder(name: str) -> bool:
    """Return whether a name is a valid folder name: one part, printable, not hidden, and not too long."""
    shown = Path(name).name == name and name.isprintable() and not name.startswith(".")
    return shown and len(name.encode()) <= MOST_RUN_NAME_BYTES


def to_json(config: Config, *, tracking: bool = False) -> str:
    """Return the configuration as one line of JSON for the sites. `tracking`: include the section `tracking`."""
    return json.dumps({key: item for key, item in _tree(config).items() if tracking or key != "tracking"}, sort_keys=True)


def from_json(text: str) -> Config:
    """Return the configuration of a text from `to_json`."""
    return from_mapping(json.loads(text))


def to_yaml(config: Config) -> str:
    """Return the whole configuration as YAML, for config.yaml and `--show`."""
    return write_yaml({"version": VERSION, **_tree(config)})


def _tree(config: Config) -> dict[str, Any]:
    if not isinstance(sites := config.sites, list) or len(sites) < MANY:
        return dataclasses.asdict(config)
    plain = [entry if isinstance(entry, Mapping) else dataclasses.asdict(entry) for entry in sites]  # not copied: many
    return {**dataclasses.asdict(dataclasses.replace(config, sites=[])), "sites": plain}


def _find(experiment: str) -> Path:
    if experiment.endswith((".yaml", ".yml")):
        path = Path(experiment).expanduser()
        if not path.is_file():
            raise UserError(f"experiment file not found: {path}")
        return path
    if experiment not in experiment_names():
        raise unknown("experiment", experiment, experiment_names())
    return FOLDER / f"{experiment}.yaml"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None


def _tree_of(text: str, where: str) -> dict[str, Any]:
    try:
        tree = read_yaml(text, lambda node: keep_texts(Config, node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = " (YAML is indented with spaces, not tabs)" if "\\t" in str(error.problem) else ""
        raise UserError(f"{where}:{position} {_first_line(error.problem)}{hint}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{where}: takes `key: value` lines at the top level")
    return tree


def _parse(overrides: Sequence[str]) -> dict[str, Any]:
    """Return dotted keys with their values, each read as YAML."""
    parsed = {}
    for text in overrides:
        key, separator, item = text.partition("=")
        if not separator or not key or key.startswith("-"):
            raise UserError(f"override '{_short(text)}': takes the form key=value, such as rounds=20")
        parsed[key] = _value(text, key, item)
    return parsed


def _value(text: str, key: str, item: str, many: bool = False) -> Any:
    """Return the value of an override's `item` for a dotted key. `many`: it is a list of values."""
    keep = values_kept_at if many else keep_texts_at
    try:
        text.encode()
        return read_yaml(item, lambda node: keep(Config, key, node))
    except UnicodeEncodeError:
        raise UserError(f"override {text!a}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        if STAR.search(item):
            raise UserError(f"override '{_short(text)}': write texts that begin with * in quotes") from None
        raise UserError(f"override '{_short(text)}': {_first_line(error.problem)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"override '{_short(text)}': {_first_line(error)}") from None


def _short(text: str) -> str:
    return plain(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}...")


def _first_line(message: object) -> str:
    return plain((str(message).splitlines() or [type(message).__name__])[0])
