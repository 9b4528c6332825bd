"""List the networks, and the points where a network can be cut into extractor and head."""

import math

import yaml

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NETWORKS, Network, parse_name
from fedloom.clients.networks.named import FOREIGN
from fedloom.clients.networks.split import split_points
from fedloom.conf.errors import UserError
from fedloom.sims.report.tables import Table

OWN = "torchvision.models:"  # what a configuration calls torchvision's networks


def names() -> list[str]:
    """Return the names of all networks, and the two patterns for names of networks from outside."""
    return [*NETWORKS.names(), f"{OWN}NAME", "MODULE:NAME"]


def points(text: str, channels: int, size: int, classes: int) -> Table:
    """Return a table with a row for each cut point, in the network's order.

    Raises UserError if `text` names no network, or a network that cannot be cut.
    """
    full_name = f"{OWN}{text.removeprefix(FOREIGN)}" if text.startswith(FOREIGN) else text
    form = Form.images(channels, size, classes)
    name = parse_name(full_name, form)
    network = name.build()
    if not isinstance(network, Network):
        raise UserError(f"network '{text}': has no extractor and head")
    shapes = split_points(network, form.zeros(1))
    if not shapes:
        raise UserError(f"network '{text}': cannot be cut; no point in it passes a single tensor")
    rows = [[point, " x ".join(map(str, shape)), math.prod(shape)] for point, shape in shapes.items()]
    images = f"{channels} x {size} x {size}"
    section = yaml.safe_dump({"name": name.name, **name.options}, default_flow_style=True, sort_keys=False, width=1000)
    note = f"'network={{name: split, of: {section.strip()}, at: POINT}}' cuts it there."
    return Table(f"{text} on images of {images}", ["point", "features of an image", "numbers"], rows, note)
