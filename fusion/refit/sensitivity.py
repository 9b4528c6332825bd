"""How much a network's answers depend on each of its channels: mean squared gradients on a few probe samples."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fedloom.fusion.graph.tracing import evaluating

SAMPLES, BATCH = 16, 8


class _Backward(fx.Interpreter):
    """Runs a graph so that the backward pass collects the gradients of the wanted nodes' values."""

    def __init__(self, graph: fx.GraphModule, dims: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.dims = dims
        self.sums: dict[str, Tensor] = {}
        self.leaves: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "placeholder" and value.is_floating_point():
            value = self._leaf(value)
        if n.name in self.dims:
            value = value if value.requires_grad else self._leaf(value)
            value.register_hook(lambda gradient, name=n.name: self._add(name, gradient))
        return value

    def _leaf(self, value: Tensor) -> Tensor:
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1] * 1.0  # because later operations can work in place

    def _add(self, name: str, gradient: Tensor) -> None:
        dims = self.dims[name]
        rows = gradient.movedim(dims, tuple(range(len(dims)))).flatten(0, len(dims) - 1).flatten(1)
        self.sums[name] = (
            self.sums.get(name, torch.zeros(len(rows), dtype=torch.float64)) + rows.double().square().sum(1).cpu()
        )


def sensitivities(
    graph: fx.GraphModule, probe: Tensor, dims: Mapping[str, tuple[int, ...]], classes: bool = True
) -> dict[str, Tensor]:
    """Return by node the sum of its channels' squared gradients [c], float64, over the first SAMPLES of `probe` [k, ...].

    The gradients are those of the log class probabilities, in a random direction for each sample, so that their mean
    is the trace of the Fisher information. With classes=False they are those of the answers. Gradients of parameters
    stay unchanged. Nodes that do not affect the answer are left out.

    `dims`: by node name, the dimensions that, flattened, are its channels.
    """
    generator, sums = torch.Generator().manual_seed(0), {}
    with evaluating(graph), torch.enable_grad():
        for batch in probe[:SAMPLES].split(BATCH):
            run = _Backward(graph, dims)
            answers = run.run(batch.clone())
            axis = 1 if answers.ndim > 3 else -1  # [k, classes, height, width], else [k, ..., classes]
            answers = (answers.log_softmax(dim=axis) if classes else answers).flatten(1)
            noise = torch.randn(answers.shape, generator=generator, dtype=torch.float64).to(answers)
            noise = noise * answers.detach().mul(0.5).exp() if classes else noise
            total = (answers * noise).sum()
            weights = [weight for weight in graph.parameters() if weight.requires_grad]  # if tokens are the input
            torch.autograd.grad(total, run.leaves or weights, allow_unused=True)
            run.env.clear()  # the answers' autograd graph has hooks that hold the run: a cycle that Python cannot collect
            for name, part in run.sums.items():
                sums[name] = sums.get(name, 0.0) + part
    return sums
