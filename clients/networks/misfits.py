"""Say why a file's tensors do not fit a network, and for which form of inputs they would."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import IMAGE, Form
from fedloom.clients.networks.foreign_files import in_names_of
from fedloom.conf.errors import UserError, plain
from fedloom.fusion.state import State

NEAR = 3  # pixels by which a size from a ratio of areas can be wrong
OUTPUTS_OPTION = "name its outputs with --classes, or "
FORM_OPTIONS = "--size N, and --grey for grey images"
NETWORK_OPTION = "--network NAME[:KEY=VALUE,...]"

Shapes = dict[str, torch.Size]  # of tensors, by name


@dataclass(frozen=True)
class Stated:
    """The network that a file should have.

    Attributes:
        name: The network's name, for messages.
        form: The form of its inputs and outputs.
        build: Builds the network for a form, or raises UserError.
        recorded: Whether the file itself states them.
    """

    name: str
    form: Form
    build: Callable[[Form], nn.Module]
    recorded: bool = False


def check_fit(path: Path, state: State, wanted: Mapping[str, Tensor], stated: Stated) -> None:
    """Raise UserError unless the state has the names, shapes and types of `wanted`, the tensors of the stated network.

    `state`: in the network's names.
    """
    difference = next(_differences(state, wanted), "")
    if not difference:
        return
    takes = f"{stated.name} for {stated.form} with {stated.form.outputs} outputs"
    if stated.recorded:
        advice = f"the file says that it is {takes}, so it is damaged: use another copy, or add {NETWORK_OPTION}"
    elif state.keys() != wanted.keys():
        advice = f"if the file's network is not {stated.name} with these options, add {NETWORK_OPTION}"
    elif form := fitting_form(stated, state):
        advice = f"that is {takes}. The file fits {form} with {form.outputs} outputs: {form_options(form, stated.form)}"
    else:
        advice = f"that is {takes}; correct the options in {NETWORK_OPTION}, or the form with {FORM_OPTIONS}"
    raise UserError(f"{path}: {difference}; {advice}")


def form_options(form: Form, stated: Form) -> str:
    """Return, as text, how to change the form from `stated` to `form` on the command line."""
    parts = [f"use --size {form.height}"] if form.height != stated.height else []
    if form.channels != stated.channels:
        parts.append("add --grey" if form.channels == 1 else "leave --grey out")
    if form.outputs != stated.outputs:
        parts.append(f"{OUTPUTS_OPTION}use a --probe domain of {form.outputs} classes")
    return ", and ".join(parts)


def fitting_form(stated: Stated, state: State) -> Form | None:
    """Return a form of square images for which the network has the shapes of the state; None without one.

    The search starts at the stated form. If several forms fit, the result is the nearest one.
    """
    if stated.form.kind != IMAGE or stated.form.height != stated.form.width:
        return None
    size = stated.form.height
    for channels in dict.fromkeys((stated.form.channels, 1, 3)):
        theirs, ours = _shapes(stated, state, Form.images(channels, size, stated.form.outputs))
        others = {shape[0] for key, shape in theirs.items() if key in ours and shape[:1] != ours[key][:1]}
        for outputs in (stated.form.outputs, *sorted(others)):
            for tried in _sizes(size, theirs, ours):
                if fits(stated, state, form := Form.images(channels, tried, outputs)):
                    return form
    return None


def fits(stated: Stated, state: State, form: Form) -> bool:
    """Return whether the network for this form has the shapes of the state."""
    theirs, ours = _shapes(stated, state, form)
    return bool(theirs) and theirs == ours


def _differences(state: State, wanted: Mapping[str, Tensor]) -> Iterator[str]:
    for key, tensor in wanted.items():
        if key not in state:
            yield f"tensor '{key}' {list(tensor.shape)} is missing"
        elif state[key].shape != tensor.shape:
            yield f"tensor '{key}' is {list(state[key].shape)}, takes {list(tensor.shape)}"
        elif state[key].dtype != tensor.dtype and not (tensor.is_floating_point() and state[key].is_floating_point()):
            yield f"tensor '{key}' has the type {state[key].dtype}, takes {tensor.dtype}"
    yield from (f"tensor '{plain(key)}' {list(state[key].shape)} is unknown" for key in state if key not in wanted)


def _shapes(stated: Stated, state: State, form: Form) -> tuple[Shapes, Shapes]:
    """Return the shapes of the file's tensors and of the network's; both empty if the network cannot have this form."""
    with suppress(UserError):
        network = stated.build(form)
        theirs, ours = in_names_of(network, state), network.state_dict()
        return {key: each.shape for key, each in theirs.items()}, {key: each.shape for key, each in ours.items()}
    return {}, {}


def _sizes(size: int, theirs: Shapes, ours: Shapes) -> list[int]:
    """Return sizes of images that the file may be for: `size`, and those that the inputs of its linear layers suggest."""
    sizes = {size: None}
    for key, shape in theirs.items():
        if len(shape) == 2 and len(ours.get(key, ())) == 2 and shape[1] != ours[key][1]:
            near = round(size * math.sqrt(shape[1] / ours[key][1]))
            around = range(max(4, near - NEAR), near + NEAR + 1)
            sizes |= dict.fromkeys(sorted(around, key=lambda each: abs(each - near)))
    return list(sizes)
