"""Refit a fused network's layers, one after the other, to their targets (sequential least squares).

Averaged weights fit no network's inputs. So each layer, in order of execution, is fitted to its targets from the
inputs that the refitted layers before it produce: a layer corrects earlier errors. No labels are needed. A layer that
already meets its targets stays unchanged. The last layer is fitted to class probabilities (fusion.refit.head), all
others by ridge regression toward their own weights (fusion.refit.least_squares).
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.graph.tracing import NORMS, evaluating
from fedloom.fusion.probe import Runner
from fedloom.fusion.refit.fits import Fit, fits
from fedloom.fusion.refit.head import fitted_head, mixed
from fedloom.fusion.refit.least_squares import change_of_rows
from fedloom.fusion.refit.patches import matrix, patches, picked, thinned, weight_of
from fedloom.fusion.refit.targets import Targets

WIDE, ROWS = 2048, 1024  # layers with more inputs use about ROWS rows: the cost grows with the square of the rows
PENALTY = 0.1  # on the change of the weights, relative to the inputs' variances
ROUNDING = 1e-4  # standard deviations from its target within which a channel stays unchanged
FLOAT = 1e-5  # relative to its size: the precision of float32


@dataclass(frozen=True)
class Refitted:
    """What a refit changed.

    Attributes:
        layers: The names of the changed layers.
        biased: The names of layers that got a bias.
        short: Name, inputs and rows of each layer with more inputs than the probe set has rows.
        answers: The logits of each network and, last, of the refitted one, [k, classes]; empty without a last linear layer.
    """

    layers: tuple[str, ...]
    biased: tuple[str, ...]
    short: tuple[tuple[str, int, int], ...]
    answers: tuple[Tensor, ...] = ()

    def notes(self) -> list[str]:
        """Return messages for users: layers that got a bias, and layers for which the probe set is small."""
        notes = []
        if self.biased:
            notes.append(f"{len(self.biased)} layers without bias got one by refit, {self.biased[0]} the first")
        if self.short:
            name, inputs, rows = max(self.short, key=lambda item: item[1] / item[2])
            notes.append(f"the probe set is small for {len(self.short)} layers: of the {inputs} inputs of '{name}' it shows "
                        f"a rank of {rows - 1} at most; in other directions its weights stay unchanged (ridge); use "
                        "more samples")  # fmt: skip
        return notes


def refit(
    network: nn.Module, wiring: Wiring, targets: Targets, probe: Tensor, positions: int | None, classes: bool = True
) -> Refitted:
    """Fit the layers of a network to targets, in place.

    Args:
        network: The network.
        wiring: The network's wiring.
        targets: What the layers should compute.
        probe: The samples of the targets, [k, ...].
        positions: How many of each channel's values to use, over all samples; None: all.
        classes: Whether the network returns logits.
    """
    share = max(1, positions // len(probe)) if positions else None
    work = _Refit(wiring, targets, share, classes)
    with torch.no_grad(), evaluating(wiring.graph):
        work.run_on(probe.clone())
        work.complete()
    return Refitted(tuple(work.changed), tuple(work.biased), tuple(work.short), tuple(work.answers))


class _Refit(Runner):
    """Runs the network, and fits each layer before it is run."""

    def __init__(self, wiring: Wiring, targets: Targets, share: int | None, classes: bool) -> None:
        super().__init__(wiring.graph)
        self.extra_traceback = False
        self.wiring, self.targets, self.share, self.classes = wiring, targets, share, classes
        self.fits = fits(wiring)
        self.nodes = {node.name: node for node in wiring.graph.graph.nodes}
        self.waiting = {node: len(node.users) for node in self.nodes.values()}  # users that have not run
        self.done: set[Node] = set()
        self.changed: list[str] = []
        self.biased: list[str] = []
        self.short: list[tuple[str, int, int]] = []
        self.head, self.answers = "", list[Tensor]()

    def run_on(self, probe: Tensor) -> None:
        self.args_iter, self.samples = iter([probe]), len(probe)
        for node in self.nodes.values():
            self._step(node)

    def complete(self) -> None:
        """If one layer got a bias, give all layers one: networks are built with or without biases."""
        if self.biased:
            for fit in self.fits.values():
                module: Any = self.submodules[fit.name]
                if not fit.norm and not isinstance(module, NORMS) and module.bias is None:
                    self._write(fit, module, module.weight, module.weight.new_zeros(_outputs(module)))

    def _step(self, node: Node) -> None:
        if node in self.done:
            return
        fit = self.fits.get(node.name)
        if fit is not None and fit.other:
            self._ahead(self.nodes[fit.other])
        if fit is not None:
            self._fit(fit, self.env[node.all_input_nodes[0]])
        self.env[node] = self.run_node(node)
        if node.name == self.head:
            self.answers.append(self.env[node])
        self.done.add(node)
        for source in node.all_input_nodes:
            self.waiting[source] -= 1
            if not self.waiting[source]:
                del self.env[source]

    def _ahead(self, node: Node) -> None:
        """Run a node, after the nodes that it needs."""
        stack = [node]
        while stack:
            missing = [source for source in stack[-1].all_input_nodes if source not in self.done]
            if missing and stack[-1] not in self.done:
                stack.append(missing[0])
            else:
                self._step(stack.pop())

    def _fit(self, fit: Fit, inputs: Tensor) -> None:
        module = self.submodules[fit.name]
        goal = self.targets.at(fit.end)
        if goal is None:
            return
        if fit.other:
            other = self.env[self.nodes[fit.other]]
            goal = goal - picked(other, self._share(other), self.wiring.layouts[fit.other].dims)
        if isinstance(module, NORMS):
            changed = self._fit_norm(fit, module, inputs, goal)
        elif self._is_head(fit, module, inputs):
            changed = self._fit_head(fit, module, inputs)
        else:
            changed = self._fit_layer(fit, module, inputs, goal)
        if changed:
            self.changed.append(fit.name)

    def _share(self, value: Tensor) -> int | None:
        return self.share and max(1, self.share * self.samples // len(value))

    def _is_head(self, fit: Fit, module: Any, inputs: Tensor) -> bool:
        fixed = all(self.wiring.axes[axis].fixed for axis in self.wiring.layouts[fit.end].entries)
        return self.classes and fixed and isinstance(module, nn.Linear) and inputs.ndim == 2

    def _fit_head(self, fit: Fit, module: Any, inputs: Tensor) -> bool:
        bias = module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias
        self.head, self.answers = fit.end, self.targets.answers(fit.end)
        goal = mixed(self.answers, self.targets.weights)
        solution = fitted_head(inputs, module.weight, bias, goal)
        if solution is None:
            return False
        self._write(fit, module, *solution)
        return True

    def _fit_layer(self, fit: Fit, module: Any, inputs: Tensor, goal: Tensor) -> bool:
        norm = self.submodules[fit.norm] if fit.norm else None
        weight, bias = _folded(module, norm)
        weight = matrix(module, weight)
        groups, every = len(weight), self._every(len(goal) // len(inputs), len(inputs), weight.shape[2])
        rows = patches(module, inputs, self._share(inputs), every)
        goal, bias = _in_groups(thinned(goal, len(inputs), every), groups), bias.view(groups, -1)
        errors = torch.baddbmm((goal - bias[:, None]), rows, weight.mT, alpha=-1.0)
        if not _wanting(errors, goal):
            return False
        if rows.shape[1] <= rows.shape[2]:
            self.short.append((fit.name, rows.shape[2], rows.shape[1]))
        more, shift = change_of_rows(rows, errors, PENALTY)
        weight, bias = weight + more.to(weight), bias + shift.to(bias)
        if norm is not None:
            _settle(norm, (rows @ weight.mT).transpose(0, 1).flatten(1), bias.flatten())
        self._write(fit, module, weight_of(module, weight), None if norm is not None else bias.flatten())
        return True

    def _every(self, positions: int, samples: int, inputs: int) -> int:
        """Return the step between the positions that are used for a layer with this many inputs."""
        return 1 if inputs <= WIDE else max(1, min(positions, positions * samples // ROWS))

    def _fit_norm(self, fit: Fit, module: Any, inputs: Tensor, goal: Tensor) -> bool:
        """Fit the scale and shift of each channel separately."""
        if module.weight.numel() != goal.shape[1]:
            return False
        plain = copy.copy(module)
        plain._parameters = {"weight": torch.ones_like(module.weight), "bias": torch.zeros_like(module.weight)}
        value = plain(inputs)
        rows = picked(value, self._share(value), self.wiring.layouts[fit.end].dims).T[:, :, None]
        weight = module.weight.flatten()[:, None, None]
        bias = torch.zeros_like(weight) if module.bias is None else module.bias.flatten()[:, None, None]
        errors = goal.T[:, :, None] - (rows * weight + bias)
        if module.bias is None or not _wanting(errors, goal.T[:, :, None]):
            return False
        more, shift = change_of_rows(rows, errors, PENALTY)
        module.weight.add_(more.to(weight).view_as(module.weight))
        module.bias.add_(shift.to(weight).view_as(module.bias))
        return True

    def _write(self, fit: Fit, module: Any, weight: Tensor, bias: Tensor | None) -> None:
        module.weight.copy_(weight)
        if module.bias is None and bias is not None:
            module.register_parameter("bias", nn.Parameter(bias.to(weight)))
            self.biased.append(fit.name)
        elif module.bias is not None:
            module.bias.copy_(torch.zeros_like(module.bias) if bias is None else bias)


def _in_groups(rows: Tensor, groups: int) -> Tensor:
    """Return [n, c] as [groups, n, c / groups]."""
    return rows.unflatten(1, (groups, -1)).transpose(0, 1)


def _wanting(errors: Tensor, goal: Tensor) -> bool:
    """Return whether any channel [g, n, m] misses its target by more than rounding; set the errors of the others to zero."""
    bound = ROUNDING * goal.std(dim=1, correction=0) + FLOAT * (goal.square().mean(dim=1) + goal.square().mean()).sqrt()
    good = errors.square().mean(dim=1).sqrt() <= bound
    errors.masked_fill_(good[:, None], 0.0)
    return not bool(good.all())


def _outputs(module: Any) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels


def _folded(module: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the weight and bias [out] of a layer, with the BatchNorm after it folded in."""
    across = isinstance(module, nn.modules.conv._ConvTransposeNd)
    bias = module.weight.new_zeros(_outputs(module)) if module.bias is None else module.bias
    if norm is None:
        return module.weight, bias
    scale = (norm.running_var + norm.eps).rsqrt() * (1.0 if norm.weight is None else norm.weight)
    shift = (0.0 if norm.bias is None else norm.bias) - norm.running_mean * scale
    if across:
        spread = scale.view(module.groups, 1, -1).expand(-1, module.in_channels // module.groups, -1).flatten(0, 1)
        return module.weight * spread.reshape(*spread.shape, *[1] * (module.weight.ndim - 2)), bias * scale + shift
    return module.weight * scale.view(-1, *[1] * (module.weight.ndim - 1)), bias * scale + shift


def _settle(norm: Any, outputs: Tensor, shift: Tensor) -> None:
    """Give a BatchNorm the statistics of its inputs, `outputs` [n, c], so that it only adds `shift`."""
    if norm.weight is None:
        norm.running_mean.copy_(-shift)
        norm.running_var.fill_(1.0 - norm.eps)
        return
    mean, variance = outputs.double().mean(dim=0), outputs.double().var(dim=0, unbiased=False)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
    norm.weight.copy_((norm.running_var + norm.eps).sqrt())
    norm.bias.copy_(shift + norm.running_mean)
