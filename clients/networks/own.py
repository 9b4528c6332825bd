"""A user's network: any torch module, or a function that makes one, divided into an extractor and a head.

The last linear layer is the head. Everything before it is the extractor. The module's own code draws its initial weights,
from the run's seed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data.form import ARRAY, FEATURES, IMAGE, SEQUENCE, TOKENS, Form
from fedloom.clients.networks.base import NETWORKS, Network, NetworkSpec, SelfStarting
from fedloom.clients.training.torch_setup import ordinary
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import call, error_summary, parameters
from fedloom.conf.randomness import drawing
from fedloom.fusion.graph.undisturbed import undisturbed
from fedloom.fusion.inputs import uncompiled
from fedloom.fusion.state import BATCH_NORM

SPELLINGS = {
    "outputs": ("classes", "num_classes", "n_classes", "outputs", "n_outputs"),
    "channels": ("channels", "in_channels", "num_channels", "in_chans"),
    "size": ("size", "image_size", "img_size", "input_size"),
    "height": ("height",),
    "width": ("width",),
    "features": ("features", "in_features", "n_features", "input_size"),
    "vocabulary": ("vocabulary", "vocab_size"),
    "length": ("length", "seq_len"),
}


@dataclass(frozen=True, eq=False)
class OwnSpec(NetworkSpec):
    """A user's network. `make(**options)` returns the module; numbers of the form are added if it takes them."""

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any]
    where: str

    def build(self, form: Form) -> Network:
        """Build the network. Raises UserError for a module that cannot be divided into extractor and head."""
        return OwnNetwork(self, form)

    @property
    def constants(self) -> bool:
        """Users' modules may have constants."""
        return True

    def module(self, form: Form) -> nn.Module:
        """Return the user's module. Raises UserError if it is not a torch module with float32 weights."""
        self._check_square(form)
        made = uncompiled(call(self.make, self.options, self._ours(_facts(form)), self.name, self.where))
        if not isinstance(made, nn.Module):
            raise self.refused(f"returned a {type(made).__name__}; it must return a torch.nn.Module")
        if wrong := [
            parameter.dtype
            for parameter in made.parameters()
            if parameter.dtype.is_floating_point and parameter.dtype != torch.float32
        ]:
            raise self.refused(f"has weights of {wrong[0]}, takes torch.float32; convert the module with float()")
        return made.eval()

    def refused(self, why: str) -> UserError:
        """Return a UserError that names the user's module; `why` continues the sentence."""
        return UserError(f"{self.where}: '{self.name}' {why}")

    def _check_square(self, form: Form) -> None:
        """Raise UserError if the function needs one size, but the images have two."""
        known, _ = parameters(self.make)
        needs = next((each.name for each in known if each.name in SPELLINGS["size"] and each.default is each.empty), "")
        if form.kind == IMAGE and form.height != form.width and needs and needs not in self.options:
            raise self.refused(f"takes '{needs}', but the data are {form}; take 'height' and 'width' in its place")

    def _ours(self, facts: Mapping[str, int]) -> dict[str, int]:
        """Return the facts that the function takes, in its spelling. A function with **kwargs gets num_classes."""
        known, others = parameters(self.make)
        names = [parameter.name for parameter in known]
        ours = {}
        for fact, item in facts.items():
            if any(spelling in self.options for spelling in SPELLINGS[fact]):
                continue
            taken = next((spelling for spelling in SPELLINGS[fact] if spelling in names), None)
            if fact == "width" and "height" not in names:
                continue  # a width of layers
            if taken or (fact == "outputs" and others):
                ours[taken or "num_classes"] = item
        return ours


class OwnNetwork(Network, SelfStarting):
    """The user's module, with its last linear layer moved out and used as the head.

    Attributes:
        head_name: The layer's name in the user's module; empty if the module is this layer.
    """

    def __init__(self, spec: OwnSpec, form: Form) -> None:
        self._made = (spec, form)
        with drawing(), ordinary():
            extractor, head, self.head_name = _fitted(spec, form)
            _check_training(spec, form, extractor, form.random(2))
        super().__init__(extractor, head)
        for module in extractor.modules():
            _leave_out_counter(module)
        _check_state(spec, self)

    def restart(self, seed: int) -> None:
        with drawing(seed), ordinary():
            fresh = Network(*_fitted(*self._made)[:2]).state_dict()
        state = self.state_dict()
        if odd := [name for name, tensor in state.items() if name not in fresh or fresh[name].shape != tensor.shape]:
            raise self._made[0].refused(
                f"has a different '{odd[0]}' each time it is made; its layers must depend only on its options"
            )
        self.load_state_dict({name: fresh[name] for name in state})


@NETWORKS.adapter
def own_network(name: str, made: Any, options: Mapping[str, Any], where: str) -> NetworkSpec:
    """Wrap a user's network `made`, a module class or a function that makes a module. Raises UserError for anything else."""
    if isinstance(made, nn.Module) or not callable(made):
        got = "is a module" if isinstance(made, nn.Module) else f"has the type {type(made).__name__}"
        raise UserError(f"{where}.name: '{name}' {got}; it must be a class derived from torch.nn.Module or a function")
    return OwnSpec(name, made, options, where)


def _facts(form: Form) -> dict[str, int]:
    """Return the numbers of a form, by the first name in SPELLINGS."""
    facts = {"outputs": form.outputs}
    if form.kind == IMAGE:
        square = {"size": form.height} if form.height == form.width else {}
        facts |= {"channels": form.channels, **square, "height": form.height, "width": form.width}
    if form.kind in (FEATURES, SEQUENCE, ARRAY):
        facts["features"] = form.features
    if form.kind == TOKENS:
        facts["vocabulary"] = form.vocabulary
    if form.kind in (SEQUENCE, TOKENS):
        facts["length"] = form.length
    return facts


def _fitted(spec: OwnSpec, form: Form) -> tuple[nn.Module, nn.Linear, str]:
    """Divide the module into extractor and head; return both and the head's name in the module.

    Raises UserError without a last linear layer or the right outputs.
    """
    module, inputs = spec.module(form), form.random(2)
    passed: list[tuple[nn.Linear, Tensor]] = []
    outputs = _forward(spec, form, module, inputs, passed)
    if isinstance(outputs, Tensor) and not _alike(outputs, _forward(spec, form, module, inputs, [])):
        raise spec.refused("returns other outputs for the same inputs in evaluation mode; remove random draws, or make them "
                           "only while self.training is true")  # fmt: skip
    wanted = [2, form.length, form.outputs] if form.each_step else [2, form.outputs]
    if not isinstance(outputs, Tensor) or list(outputs.shape) != wanted:
        fault = f"returns {_named(outputs)} for 2 examples ({form}), must return {wanted}"
        mend = "add a parameter `classes` (or num_classes)" if isinstance(outputs, Tensor) else "return the scores alone"
        raise spec.refused(f"{fault}; {mend}")
    head = passed[-1][0] if passed else None
    if head is None or [layer for layer, _ in passed].count(head) > 1 or not torch.equal(passed[-1][1], outputs):
        raise spec.refused(
            "does not end with a linear layer (torch.nn.Linear), which becomes the head; no layer may follow it"
        )
    names = [name for name, part in module.named_modules(remove_duplicate=False) if part is head]
    shared = [weight for _, weight in module.named_parameters(remove_duplicate=False)]
    if len(names) > 1 or len({id(weight) for weight in shared}) < len(shared):
        raise spec.refused("uses the same weights under two names; each weight must have one name")
    if names == [""]:
        return nn.Identity(), head, ""
    module.set_submodule(names[0], nn.Identity())
    if not torch.equal(_forward(spec, form, nn.Sequential(module, head), inputs, []), outputs):
        raise spec.refused(f"returns other outputs when '{names[0]}' is moved to its end; use that layer once, at the end")
    return module, head, names[0]


def _check_training(spec: OwnSpec, form: Form, extractor: nn.Module, inputs: Tensor) -> None:
    """Raise UserError if outputs or the state differ in form in training mode. Changes nothing."""
    buffers = [(buffer, buffer.clone()) for buffer in extractor.buffers()]
    with undisturbed(extractor, values=True):
        usual, state = _named(_forward(spec, form, extractor, inputs, [])), _shapes(extractor)
        got = _named(_forward(spec, form, extractor.train(), inputs, [], " in training mode"))
        odd = [name for name, shape in _shapes(extractor).items() ^ state.items()]
    for buffer, before in buffers:
        buffer.copy_(before)
    if odd:
        raise spec.refused(f"changes the shape of '{min(odd)}' in training; what is in the state (state_dict) must keep its "
                           "shape: use a fixed size, or an attribute")  # fmt: skip
    if got == usual:
        return
    auxiliary = any(getattr(module, "aux_logits", False) for module in extractor.modules())
    mend = f"set {spec.where}.aux_logits=false" if auxiliary else "its forward must return the same form in both modes"
    raise spec.refused(f"passes {got} to its last layer in training mode, but {usual} in evaluation mode; {mend}")


def _alike(one: Tensor, other: Any) -> bool:
    """Return whether two outputs are the same, up to NaN."""
    return isinstance(other, Tensor) and one.shape == other.shape and torch.allclose(one, other, equal_nan=True)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(item.shape) for name, item in module.state_dict().items() if isinstance(item, Tensor)}


def _named(outputs: Any) -> str:
    return str(list(outputs.shape)) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"


def _check_state(spec: OwnSpec, network: Network) -> None:
    """Raise UserError for a state that cannot be summed over sites, and for a network that cannot be trained."""
    for name, item in network.state_dict().items():
        if not isinstance(item, Tensor):
            raise spec.refused(f"stores more than tensors in '{name}' (get_extra_state), which cannot be summed; remove it")
        if not item.dtype.is_floating_point and item.dtype != torch.int64:
            raise spec.refused(
                f"has '{name}' of the type {item.dtype}, which cannot be summed; register it with persistent=False"
            )
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise spec.refused("has no trainable weights: requires_grad is False everywhere")


def _leave_out_counter(module: nn.Module) -> None:
    """Remove BatchNorm's batch counter from the state if nothing depends on it, since counters cannot be averaged."""
    if isinstance(module, BATCH_NORM) and module.momentum is not None and module.num_batches_tracked is not None:
        module.register_buffer("num_batches_tracked", module.num_batches_tracked, persistent=False)
        module.register_load_state_dict_pre_hook(_forget_counter)


def _forget_counter(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Remove the counter that torch adds to a state without one."""
    state.pop(f"{prefix}num_batches_tracked", None)


def _forward(
    spec: OwnSpec, form: Form, module: nn.Module, inputs: Tensor, passed: list[tuple[nn.Linear, Tensor]], mode: str = ""
) -> Any:
    """Return the module's outputs. Appends the linear layers used, with their outputs, to `passed`."""

    def note(layer: nn.Module, _: Any, outputs: Tensor) -> None:
        if isinstance(layer, nn.Linear):
            passed.append((layer, outputs))

    hooks = [layer.register_forward_hook(note) for layer in module.modules() if isinstance(layer, nn.Linear)]
    try:
        with torch.no_grad():
            return module(inputs)
    except (Exception, SystemExit) as error:
        hint = (
            "; data.size and data.grey (fuse, align: --size, --grey) change their shape"
            if form.kind == IMAGE
            else "; it must take these inputs"
        )
        hint = "; forward must take the inputs as its only argument" if "positional" in str(error) else hint
        raise spec.refused(f"fails on {form}{mode} ({error_summary(error)}){hint}") from error
    finally:
        for hook in hooks:
            hook.remove()
