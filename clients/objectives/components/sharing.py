"""The part of a site's network that each method shares. Sites and server read the same table."""

from dataclasses import dataclass

from fedloom.clients.networks.base import EXTRACTOR, HEAD
from fedloom.fusion.state import State

COMPATIBLE, ALONE = "compatible", "alone"


@dataclass(frozen=True)
class Sharing:
    """How a method shares a network. Parts are prefixes of tensors' names.

    `stages`: the share of the round's steps at the end of each stage, and the parts to train in it.
    """

    averaged: tuple[str, ...] = ()  # parts that sites send and the server averages
    common: tuple[str, ...] = ()  # parts with the same initial weights at all sites
    stages: tuple[tuple[float, tuple[str, ...]], ...] = ((1.0, (EXTRACTOR, HEAD)),)
    fitted: tuple[str, ...] = ()  # parts that a site fits to its images before it uses its network
    prototypes: bool = False  # the server trains a head on the mean features of classes

    def part(self, state: State) -> State:
        """Return the part of a network's state that is averaged."""
        return {name: tensor for name, tensor in state.items() if name.startswith(self.averaged)} if self.averaged else {}


SHARING = {
    COMPATIBLE: Sharing(),  # only auxiliary heads
    ALONE: Sharing(),
    # McMahan et al. 2017, Alg. 1: everything is averaged
    "fedavg": Sharing(averaged=(EXTRACTOR, HEAD), common=(EXTRACTOR, HEAD)),
    # Arivazhagan et al. 2019, Alg. 1: base layers are averaged, personalisation layers stay at the site
    "fedper": Sharing(averaged=(EXTRACTOR,)),
    # Liang et al. 2020, Alg. 1: local representations, a head that is averaged
    "lg_fedavg": Sharing(averaged=(HEAD,)),
    # Collins et al. 2021, Alg. 1: first the head, with frozen representation; then the representation, with frozen head
    "fedrep": Sharing(averaged=(EXTRACTOR,), stages=((0.5, (HEAD,)), (1.0, (EXTRACTOR,)))),
    # Oh et al. 2022, Sec. 4: all share one random head, which is fitted to each site's images at the end
    "fedbabu": Sharing(averaged=(EXTRACTOR,), common=(HEAD,), stages=((1.0, (EXTRACTOR,)),), fitted=(HEAD,)),
    # Yi et al. 2023, Alg. 1: each site has its own network; the server's head replaces its head in each round
    "fedgh": Sharing(prototypes=True),
}
