"""Networks by name, and network files: the weights and, in the metadata, everything that builds the network again."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from fedloom.clients.data.form import DIMENSIONS, IMAGE, KINDS, Form
from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks.base import NETWORKS, check_inputs
from fedloom.clients.storage.states import read_metadata, write_state
from fedloom.conf.errors import UserError, plain, unknown
from fedloom.conf.plugins import is_reference
from fedloom.conf.randomness import drawing
from fedloom.conf.yaml_text import read_yaml
from fedloom.fusion.state import State

FOREIGN = "torchvision:"  # prefix of the names of torchvision's classification networks
KEY = "built_as"  # the metadata's key for the NetworkName, as JSON
RUN_KEY = "network"  # the metadata's key for the section `network` of a run's configuration
FORM_KEY = "form"  # the metadata's key for the form of a run's network, as JSON
DEFAULT, OTHER_SIZE = Form.images(3, 32, 10), (48, 48)  # where the search for a form starts; a size that only some take
SPLIT_KEY = "split"  # the metadata's key for the SplitRule of the training, as JSON


@dataclass(frozen=True)
class NetworkName:
    """Everything that builds a network: name, options, and the form of the inputs and outputs that it is for."""

    name: str
    options: Mapping[str, Any]
    form: Form

    def build(self) -> nn.Module:
        """Build the network with undefined weights (torchvision's with its own initial weights).

        torch's global generator stays unchanged. Raises UserError for an unknown name or option.
        """
        for key, numbers in (("shape", self.form.shape), ("outputs", [self.form.outputs])):
            if min(numbers, default=1) < 1:
                raise UserError(f"{key}: got {' x '.join(map(str, numbers))}, takes numbers of at least 1")
        if self.name.startswith(FOREIGN):
            return _foreign(self)
        return NETWORKS.create(self.name, self.options, "network").empty(self.form)


def parse_name(text: str, form: Form) -> NetworkName:
    """Parse the name of a network with its options.

    Examples: `vgg13`, `vgg13:norm=batch,width=0.5`, `mlp:widths=[40,20]`, `torchvision:resnet18`, your own
    `my_package.nets:TinyNet` or `my_package.nets:TinyNet:hidden=20`.

    Raises UserError for an unknown name and for options that are not key=value. `build` checks keys and values.
    """
    if text.startswith(FOREIGN):
        return NetworkName(text, {}, form)
    name, separator, rest = text.partition(":")
    if name not in NETWORKS.names() and is_reference(":".join(text.split(":")[:2])):
        attribute, separator, rest = rest.partition(":")
        name = f"{name}:{attribute}"
    NETWORKS.find(name)
    options: dict[str, Any] = {}
    for part in _split(rest) if separator else []:
        key, equals, item = (piece.strip() for piece in part.partition("="))
        if not (key and equals and item) or key in options:
            raise UserError(
                f"network '{text}': got the option '{part}', takes {name}:KEY=VALUE,KEY=VALUE with each key once"
            )
        try:
            options[key] = read_yaml(item)
        except yaml.YAMLError:
            raise UserError(f"network '{text}': the value of '{key}' cannot be read: '{item}'") from None
    return NetworkName(name, options, form)


def _split(text: str) -> list[str]:
    """Split a text at commas outside brackets."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def save_network(path: Path, network: nn.Module, name: NetworkName, split: SplitRule | None = None) -> None:
    """Write the network's parameters and buffers to a safetensors file, with what builds it in the metadata.

    `split`: the rule that separated the network's training examples from test examples; None: unknown.
    """
    built_as = {"name": name.name, "options": dict(name.options), "form": name.form.plain()}
    write_state(path, network.state_dict(), **{KEY: json.dumps(built_as)}, **split_metadata(split))


def split_metadata(split: SplitRule | None) -> dict[str, str]:
    """Return the metadata with which a network's file records the split of its training; empty for None."""
    return {SPLIT_KEY: split.text()} if split else {}


def read_split(path: Path) -> SplitRule | None:
    """Return the split that a network's file records; None if it records none. Raises UserError for an unreadable file."""
    return SplitRule.parsed(_metadata(path).get(SPLIT_KEY, ""))


def load_network(path: Path, name: NetworkName | None = None) -> tuple[nn.Module, NetworkName]:
    """Load the network in a file. Returns it in evaluation mode, with its name (None: the one that save_network wrote).

    The file is one of safetensors or torch.save, also one of a user with the names of tensors in the user's module.

    Raises UserError for a file that is missing, unreadable or unnamed, and for a tensor that is missing, unknown, of another
    shape or not finite.
    """
    if not path.is_file():
        raise UserError(f"{path}: the file does not exist. Pass the path of a network's .safetensors or .pt file.")
    from fedloom.clients.networks.foreign_files import in_names_of, read_tensors  # training needs no files
    from fedloom.clients.networks.misfits import Stated, check_fit

    recorded, metadata = name is None, _metadata(path)
    state = read_tensors(path)
    if name is None and KEY not in metadata and not {RUN_KEY, FORM_KEY} <= metadata.keys():
        raise _unnamed(path, metadata, state)
    name = built_as = name or _read_name(path, metadata)
    try:
        network = name.build()
    except UserError as error:
        raise UserError(f"{path}: {plain(str(error))}") from None
    state = in_names_of(network, state)
    stated = Stated(name.name, name.form, lambda form: replace(built_as, form=form).build(), recorded)
    check_fit(path, state, network.state_dict(), stated)
    network.load_state_dict(state)
    for key, tensor in network.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: tensor '{key}' has NaN or infinite values; use another file")
    return network.eval(), name


def _foreign(name: NetworkName) -> nn.Module:
    from torchvision import models  # slow to import, and rarely needed

    known = [FOREIGN + known for known in models.list_models(module=models)]
    if name.name not in known:
        raise unknown("network", name.name, known)
    if name.options:
        raise UserError(f"network '{name.name}': takes no options, got {', '.join(map(str, name.options))}")
    check_inputs(name.form, name.name, IMAGE)
    if name.form.channels != 3:
        got = f"got {name.form.channels}; set data.grey=false for 3"
        raise UserError(f"network '{name.name}': takes images of 3 channels, {got}")
    with drawing():
        return models.get_model(name.name.removeprefix(FOREIGN), weights=None, num_classes=name.form.outputs)


def read_form(path: Path) -> Form | None:
    """Return the form of the network that a file records; None if it records none. Raises UserError if unreadable."""
    try:
        fields = _fields(_metadata(path))
        return _read_form(fields) if fields else None
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def _metadata(path: Path) -> dict[str, str]:
    from fedloom.clients.networks.foreign_files import is_of_torch

    return {} if is_of_torch(path) else read_metadata(path)


def _fields(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return name, options and form in a file's metadata; empty without them. Raises ValueError, TypeError or KeyError."""
    if KEY in metadata:
        return dict(json.loads(metadata[KEY]))
    if RUN_KEY not in metadata or FORM_KEY not in metadata:
        return {}
    options = dict(json.loads(metadata[RUN_KEY]))
    return {"name": options.pop("name"), "options": options, "form": json.loads(metadata[FORM_KEY])}


def _read_name(path: Path, metadata: Mapping[str, str]) -> NetworkName:
    try:
        fields = _fields(metadata)
        name = NetworkName(fields["name"], fields["options"], _read_form(fields))
    except (KeyError, TypeError, ValueError, RecursionError):
        name = None
    if name is None or not isinstance(name.name, str) or not isinstance(name.options, dict):
        raise UserError(f"{path}: its metadata '{KEY if KEY in metadata else FORM_KEY}' is not a valid network's name. "
                        "Add --network NAME[:KEY=VALUE,...]")  # fmt: skip
    if untrusted := _untrusted(name):
        fault = f"has the network '{plain(untrusted)}' of another package, which is not imported unless you say so"
        raise UserError(
            f"{path}: {fault}. If you trust it, add --network {_hint(json.dumps({'name': name.name, **name.options}))}"
        )
    return name


def _untrusted(name: NetworkName) -> str:
    """Return the first network of another package that building would import; empty without one."""
    foreign, section = name.name.startswith(FOREIGN), {"name": name.name, **name.options}
    return next((each for each in _named(section) if is_reference(each) and not foreign), "")


def _unnamed(path: Path, metadata: Mapping[str, str], state: State) -> UserError:
    """Return an error for a file that does not record its network or its form, with the options to add as far as known."""
    from fedloom.clients.networks.misfits import FORM_OPTIONS, Stated, fits, fitting_form

    section, form = metadata.get(RUN_KEY, ""), f", {FORM_OPTIONS}"
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        options = dict(json.loads(section))
        name = NetworkName(str(options.pop("name")), options, DEFAULT)
        if not _untrusted(name):
            stated = Stated(name.name, DEFAULT, lambda form: replace(name, form=form).build())
            fitting = fitting_form(stated, state)
            if fitting and not fits(stated, state, replace(fitting, shape=(fitting.channels, *OTHER_SIZE))):
                form = f" --size {fitting.height}" + " --grey" * (fitting.channels == 1)
    return UserError(f"{path}: does not name its network and the form of its inputs. Add --network {_hint(section)}{form}")


def _read_form(fields: Mapping[str, Any]) -> Form:
    """Return the form in a file's metadata. Older files have channels, size and classes of square images instead."""
    form = (
        Form.parsed(fields["form"])
        if "form" in fields
        else Form.images(*(fields[k] for k in ("channels", "size", "classes")))
    )
    whole = all(type(number) is int for number in (*form.shape, form.outputs, form.vocabulary))
    dimensions = DIMENSIONS.get(form.kind, len(form.shape))
    if not whole or form.kind not in KINDS or len(form.shape) != dimensions or type(form.each_step) is not bool:
        raise ValueError("not a form")
    return form


def _named(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of networks in a section and in its subsections."""
    left: list[Any] = [section]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield from (str(item) for key, item in part.items() if key == "name")
        left += part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()


def _hint(section: str) -> str:
    """Return the --network argument for the section `network` of a run's configuration, or a general form."""
    try:
        options = dict(json.loads(section))
        name = options.pop("name")
    except (KeyError, TypeError, ValueError, RecursionError):
        return "NAME[:KEY=VALUE,...]"
    arguments = ",".join(f"{key}={json.dumps(item, separators=(',', ':')).strip(chr(34))}" for key, item in options.items())
    return shlex.quote(f"{name}:{arguments}" if arguments else str(name))
