"""Base learners: they compute a shared layer's weights from shared and the site's own parameters."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.conf.errors import UserError
from fedloom.conf.registry import Registry
from fedloom.conf.typed import option
from fedloom.fusion.state import State

WEIGHT, BIAS = "weight", "bias"


@dataclass(frozen=True)
class BaseLearner(ABC):
    """Base class of base learners. Register your own in BASE_LEARNERS, or name it as `module:attribute`.

    It computes a shared layer's tensors: "weight", [out, in, k, k] or [out, in], and "bias", [out], if the layer has one.
    """

    @abstractmethod
    def shared(self, layer: State, generator: torch.Generator) -> State:
        """Return the initial shared parameters of a layer. `layer`: its initial tensors in an ordinary network."""

    def own(self, layer: State, generator: torch.Generator) -> State:
        """Return a site's own initial parameters of a layer."""
        return {}

    @abstractmethod
    def weights(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the layer's weight and bias, computed from shared and own parameters, and differentiable in both."""

    def check(self, layer: State, name: str) -> None:
        """Raise UserError for a layer that the learner does not support."""
        return


BASE_LEARNERS: Registry[BaseLearner] = Registry("base learner", BaseLearner)


@BASE_LEARNERS.register("hps")
@dataclass(frozen=True)
class HardSharing(BaseLearner):
    """Hard parameter sharing (Caruana 1997): a shared layer is the same at all sites."""

    def shared(self, layer: State, generator: torch.Generator) -> State:
        return {name: tensor.clone() for name, tensor in layer.items()}

    def weights(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(shared)


@BASE_LEARNERS.register("tf")
@dataclass(frozen=True)
class TensorFactorisation(BaseLearner):
    """Tucker factorisation (Yang & Hospedales 2017; Bulat et al. 2020).

    A weight is a shared core of its shape, times the site's square matrix for each dimension. The bias is the site's.
    Matrices start at the identity.
    """

    def shared(self, layer: State, generator: torch.Generator) -> State:
        return {"core": layer[WEIGHT].clone()}

    def own(self, layer: State, generator: torch.Generator) -> State:
        factors = {f"factor{dimension}": torch.eye(size) for dimension, size in enumerate(layer[WEIGHT].shape)}
        return {**factors, **_bias(layer)}

    def weights(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = shared["core"]
        for dimension in range(weight.ndim):  # each step multiplies the first dimension and moves it to the end
            weight = torch.einsum("a...,ab->...b", weight, own[f"factor{dimension}"])
        return {WEIGHT: weight, **({BIAS: own[BIAS]} if BIAS in own else {})}


@BASE_LEARNERS.register("df_cnn")
@dataclass(frozen=True)
class DeconvolutionalFactorisation(BaseLearner):
    """DF-CNN (Lee et al. 2019), for convolutions with an odd kernel k = 2h - 1.

    The site deconvolves a small shared tensor [c, h, h] to [m, k, k] (stride 2), applies ReLU, and contracts the result with
    its tensor [m, out, in]. The contracted tensors start with a norm of about 1, so that a step moves the weights as far as
    in an ordinary layer.
    """

    knowledge: float = option(0.5, "channels of the shared tensor, as a share of the layer's outputs", low=0.01, high=16.0)
    middle: float = option(1.0, "channels after the deconvolution, as a share of the layer's outputs", low=0.01, high=16.0)

    def shared(self, layer: State, generator: torch.Generator) -> State:
        out, side = len(layer[WEIGHT]), (layer[WEIGHT].shape[-1] + 1) // 2
        channels = _share(out, self.knowledge)
        return {"knowledge": torch.randn(channels, side, side, generator=generator) / math.sqrt(channels)}

    def own(self, layer: State, generator: torch.Generator) -> State:
        out, inputs, kernel = layer[WEIGHT].shape[:3]
        channels, middle, side = _share(out, self.knowledge), _share(out, self.middle), (kernel + 1) // 2
        reached = ((3 * side - 2) / kernel) ** 2  # mean number of inputs to each position of the deconvolution
        return {
            "deconvolution": torch.randn(channels, middle, 3, 3, generator=generator) * math.sqrt(2 / (middle * reached)),
            "shift": torch.zeros(middle),
            "contraction": torch.randn(middle, out, inputs, generator=generator) * math.sqrt(2 / (out * kernel**2)),
            **_bias(layer),
        }

    def weights(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        grown = F.conv_transpose2d(shared["knowledge"], own["deconvolution"], own["shift"], stride=2, padding=1)
        weight = torch.einsum("moi,mhw->oihw", own["contraction"], F.relu(grown))
        return {WEIGHT: weight, **({BIAS: own[BIAS]} if BIAS in own else {})}

    def check(self, layer: State, name: str) -> None:
        """Raise UserError unless the layer is a convolution with an odd, square kernel in one group."""
        shape = layer[WEIGHT].shape
        if len(shape) != 4 or shape[2] != shape[3] or not shape[2] % 2:
            fault = f"'{name}' has weights {' x '.join(map(str, shape))}"
            raise UserError(f"objective.learner: df_cnn takes convolutions with odd square kernels; {fault}")


def _share(outputs: int, share: float) -> int:
    return max(1, round(outputs * share))


def _bias(layer: State) -> State:
    return {BIAS: layer[BIAS].clone()} if BIAS in layer else {}
