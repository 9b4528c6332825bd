"""Observe a network on a probe set in one pass: sample Grams of its layers, and values of some neurons.

It stores nothing as large as the activations. Grams are [k, k] for k samples. Of a convolution's positions it stores
a fixed number, the same in every network.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.refit.patches import picked

BATCH = 256  # samples in one forward pass; Grams are computed within a batch
LARGE, CHUNK = 2**24, 40  # a convolution whose input has more bytes processes CHUNK samples at once
EXACT_FEATURES = 8192  # up to here, Grams are computed in float64; above, in float32 by pieces, summed in float64
PIECE, BAND = 2048, 100


@dataclass(frozen=True, eq=False)
class Moments:
    """For each channel: number, sum and sum of squares of its values, float64. Moments of batches can be added."""

    count: int
    sums: Tensor
    squares: Tensor

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.count + other.count, self.sums + other.sums, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        """The means, [channels]."""
        return self.sums / self.count

    @property
    def std(self) -> Tensor:
        """The population standard deviations, [channels]."""
        return (self.squares / self.count - self.mean.square()).clamp(min=0.0).sqrt()


@dataclass(eq=False)
class Observation:
    """What a network did on a probe set, by name of the observed node.

    Attributes:
        grams: Inner products of the samples, for each batch [k, k], float64, not centred.
        features: [channels, values], with the same samples and positions in every network of the same resolution.
            Channels follow the wiring's layout of the node.
        moments: Those of the node's channels.
    """

    grams: dict[str, list[Tensor]] = field(default_factory=dict)
    features: dict[str, list[Tensor]] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)


def observe(
    wiring: Wiring,
    probe: Tensor,
    *,
    features: Collection[str] = (),
    grams: Collection[str] = (),
    moments: Collection[str] = (),
    positions: int | None = None,
    every: int = 1,
) -> Observation:
    """Run the network on the probe set in eval mode and observe some of its nodes.

    Training flags and BatchNorm statistics stay unchanged.

    Args:
        wiring: The network's wiring.
        probe: Inputs, [k, ...].
        features: The names of the nodes whose values to store.
        grams: The names of the nodes whose Grams to compute.
        moments: The names of the nodes whose moments to compute.
        positions: How many values of each channel to store, over all samples; None: all.
        every: Moments are computed on every n-th sample only.

    Raises:
        UserError: The probe set is not usable (check_probe), or features or Grams are not finite. The message has the layer.
    """
    check_probe(wiring.graph, probe)
    share = max(1, positions // len(probe)) if positions else None
    looker = _Looker(wiring, (set(features), set(grams), set(moments)), share, every)
    with torch.no_grad(), evaluating(wiring.graph):
        for batch in probe.split(BATCH):
            looker.samples = len(batch)
            looker.run(batch.clone())
            looker.first = (looker.first - len(batch)) % every
            looker.done += len(batch)
    return looker.seen


def features_of(seen: Observation, node: str) -> Tensor:
    """Return all values observed at a node, [channels, values]."""
    parts = seen.features[node]
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def cka(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the linear CKA from uncentred Grams of batches (Kornblith et al. 2019, Eq. 3); 0 for a constant layer."""
    pairs = [(_centred(x), _centred(y)) for x, y in zip(one, other, strict=True)]
    shared = sum(float((x * y).sum()) for x, y in pairs)
    own = sum(float((x * x).sum()) for x, _ in pairs) * sum(float((y * y).sum()) for _, y in pairs)
    return shared / own**0.5 if own > 0 else 0.0


def check_probe(network: nn.Module, probe: Tensor) -> None:
    """Raise UserError unless the probe set has two or more finite samples of the network's dtype, or tokens."""
    if not isinstance(probe, Tensor) or probe.layout is not torch.strided:
        raise UserError(f"the probe set is a {type(probe).__name__}; use a dense torch.Tensor [k, ...]")
    if probe.ndim < 2 or len(probe) < 2:
        raise UserError(f"the probe set has the shape {list(probe.shape)}; use [k, ...] with k >= 2 (200 is usual)")
    like = next(network.parameters(), probe)
    if probe.device != like.device:
        raise UserError(f"the probe set is on {probe.device}, the network on {like.device}: move one of them")
    tokens = not probe.is_floating_point() and any(isinstance(module, nn.Embedding) for module in network.modules())
    if probe.dtype != like.dtype and not tokens:
        raise UserError(f"the probe set is {probe.dtype}, the network {like.dtype}: convert one of them")
    if not bool(torch.isfinite(probe).all()):
        raise UserError("the probe set holds values that are not finite")


class Runner(fx.Interpreter):
    """Runs a graph node by node; large convolutions run on pieces of the batch, because their workspace is large."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.submodules[target]
        if not isinstance(module, nn.modules.conv._ConvNd) or kwargs or args[0].nbytes <= LARGE:
            return module(*args, **kwargs)
        inputs, outputs = args[0], None
        for begin in range(0, len(inputs), CHUNK):
            part = module(inputs[begin : begin + CHUNK])
            outputs = part.new_empty(len(inputs), *part.shape[1:]) if outputs is None else outputs
            outputs[begin : begin + CHUNK] = part
        return outputs


class _Looker(Runner):
    """Observes values before a later in-place operation can change them."""

    def __init__(self, wiring: Wiring, wanted: tuple[set[str], set[str], set[str]], share: int | None, every: int) -> None:
        super().__init__(wiring.graph)
        self.layouts = wiring.layouts
        self.extra_traceback = False
        self.features, self.grams, self.moments = wanted
        self.share, self.every, self.seen = share, every, Observation()
        self.samples, self.done = 0, 0  # samples in this batch, and before it
        self.first = 0  # the first sample of the batch that counts for moments

    def run_node(self, n: fx.Node) -> Any:
        value, seen = super().run_node(n), self.seen
        if n.name in self.moments and len(value) > self.first:
            new = moments_of(value[self.first :: self.every])
            seen.moments[n.name] = seen.moments[n.name] + new if n.name in seen.moments else new
        if n.name in self.features or n.name in self.grams:
            _check_finite(n, value)
        if n.name in self.grams:
            seen.grams.setdefault(n.name, []).append(_gram(value.flatten(1)))
        if n.name in self.features:
            seen.features.setdefault(n.name, []).append(self._channels(n.name, value))
        return value

    def _channels(self, node: str, value: Tensor) -> Tensor:
        """Return [entries of the dimensions that carry channels, values]; the number of values depends only on `share`."""
        dims = self.layouts[node].dims if node in self.layouts else (1,)
        loose = self.layouts[node].others if node in self.layouts else ()
        for dim in loose:  # their order differs between networks
            value = value.sort(dim=dim).values
        share = self.share and max(1, self.share * self.samples // len(value))
        return picked(value, share, dims, self.done * len(value) // self.samples).T.contiguous()


def _check_finite(node: fx.Node, value: Tensor) -> None:
    if not bool(torch.isfinite(torch.stack(value.aminmax())).all()):
        raise UserError(f"layer '{node.target}': its outputs are not finite: the network has NaN or far too large weights")


def moments_of(value: Tensor) -> Moments:
    """Return the Moments of the channels of a tensor [k, c, ...]."""
    value = value.flatten(2) if value.ndim > 2 else value[:, :, None]
    sums, squares = value.sum(dim=2), torch.linalg.vector_norm(value, dim=2).double().square()
    return Moments(value.shape[0] * value.shape[2], sums.double().sum(dim=0), squares.sum(dim=0))


def _gram(rows: Tensor) -> Tensor:
    """Return the Gram [k, k], float64, of rows [k, features]."""
    if rows.shape[1] <= EXACT_FEATURES:
        rows = rows.double()
        return rows @ rows.T
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for piece in rows.split(PIECE, dim=1):
        for begin in range(0, len(rows), BAND):  # only below the diagonal
            total[begin:, begin : begin + BAND] += piece[begin:] @ piece[begin : begin + BAND].T
    return total.tril() + total.tril(-1).T


def _centred(gram: Tensor) -> Tensor:
    means = gram.mean(dim=0)
    return gram - means - means[:, None] + means.mean()
