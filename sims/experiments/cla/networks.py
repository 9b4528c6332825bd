"""The VGGs of CLA+OT (Sec. 4.2, App. B): a teacher of double, a student of half width. First and last layers are normal."""

from dataclasses import dataclass

from fedloom.clients.networks.base import NETWORKS
from fedloom.clients.networks.plain import POOL, PlainSpec


@NETWORKS.register("vgg13_double")
@dataclass(frozen=True)
class Vgg13Double(PlainSpec):
    """A VGG13 of 33 million parameters. The paper prints 1028 for 1024."""

    layout = (64, 128, POOL, 256, 256, POOL, 512, 512, POOL, 1024, 1024, POOL, 1024, 512, POOL)


@NETWORKS.register("vgg11_half")
@dataclass(frozen=True)
class Vgg11Half(PlainSpec):
    """A VGG11 of 3 million parameters."""

    layout = (64, POOL, 64, POOL, 128, 128, POOL, 256, 256, POOL, 256, 512, POOL)
