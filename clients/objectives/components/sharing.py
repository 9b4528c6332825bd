"""Which part of a site's network each method shares: a table that sites and server both read."""

from dataclasses import dataclass

from fedloom.clients.networks.base import EXTRACTOR, HEAD
from fedloom.fusion.state import State

COMPATIBLE, ALONE = "compatible", "alone"


@dataclass(frozen=True)
class Sharing:
    """`averaged`: prefixes of what sites send and the server averages. `common`: prefixes of what all start alike with.

    `stages`: what is trained one after the other, and until which share of a round's steps; the rest of the network stays
    as it is meanwhile. `fitted`: prefixes of what a site fits to its images before it uses its network. `prototypes`: the
    server trains a head on the mean features of classes.
    """

    averaged: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    stages: tuple[tuple[float, tuple[str, ...]], ...] = ((1.0, (EXTRACTOR, HEAD)),)
    fitted: tuple[str, ...] = ()
    prototypes: bool = False

    def part(self, state: State) -> State:
        """Of a network's state, what is averaged."""
        return {name: tensor for name, tensor in state.items() if name.startswith(self.averaged)} if self.averaged else {}


SHARING = {
    COMPATIBLE: Sharing(),  # auxiliary heads alone
    ALONE: Sharing(),
    # McMahan et al. 2017, Alg. 1: all of it is averaged
    "fedavg": Sharing(averaged=(EXTRACTOR, HEAD), common=(EXTRACTOR, HEAD)),
    # Arivazhagan et al. 2019, Alg. 1: base layers are averaged, personalisation layers stay at the site
    "fedper": Sharing(averaged=(EXTRACTOR,)),
    # Liang et al. 2020, Alg. 1: local representations, a head that is averaged
    "lg_fedavg": Sharing(averaged=(HEAD,)),
    # Collins et al. 2021, Alg. 1: the head first, the representation frozen; then the representation, the head frozen
    "fedrep": Sharing(averaged=(EXTRACTOR,), stages=((0.5, (HEAD,)), (1.0, (EXTRACTOR,)))),
    # Oh et al. 2022, Sec. 4: the head stays as drawn, one for all, and is fitted to each site's images at the end
    "fedbabu": Sharing(averaged=(EXTRACTOR,), common=(HEAD,), stages=((1.0, (EXTRACTOR,)),), fitted=(HEAD,)),
    # Yi et al. 2023, Alg. 1: networks of one's own, whose heads the server's takes the place of in each round
    "fedgh": Sharing(prototypes=True),
}
