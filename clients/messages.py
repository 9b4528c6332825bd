"""What server and sites say to each other: names of records and the conversion of states to Flower's arrays.

A train message holds one record ORDER and array records; its reply holds array records and METRICS.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from clients.npy import decode, encode
from fusion.exact import State

ORDER = "order"
METRICS = "metrics"
TRAIN = "train"
QUERY = "query"
WHO = "who"

MEAN = "mean"  # down: the aggregate extractor (mean of the sites' contributions) and the shared head
STAR = "star"  # down and up: the free aggregated network N*
SUBSET = "subset/"  # down: + site name: the mean without that site
OWN = "own"  # down, to a site that lost its store: its last contribution
LOST = "own state is lost"  # in the error of such a site
SITE = "site"  # up: what the server keeps for this site and can subtract
PARTIAL = "partial"  # up: says that SITE and ROUND are exact sums over several sites, or that another reply has them
ROUND = "round"  # up: what is averaged over the replies of this round and kept for no site


@dataclass(frozen=True)
class Order:
    """What a site is asked to do: train in round `round`, starting from its own state after round `base` (0: none).

    `members` is the number of sites in the aggregate. `ledger` is the folder where whoever adds contributions up on the way
    writes each of them (empty: nobody does); `before` is the file of the one that is in the sum now.
    """

    config: str  # the whole configuration, conf.to_json
    run: str  # identifies the run; the site's store is keyed by it
    site: int  # place in the roster
    round: int
    base: int
    members: int
    ledger: str = ""
    before: str = ""

    def record(self) -> ConfigRecord:
        """As a Flower record."""
        return ConfigRecord({"json": json.dumps(asdict(self))})


def read_order(content: RecordDict) -> Order:
    """The inverse of Order.record, from a message's content."""
    return Order(**json.loads(str(content.config_records[ORDER]["json"])))


def to_arrays(state: Mapping[str, Tensor]) -> ArrayRecord:
    """A state as a Flower record (bfloat16, which Flower cannot carry, as float32)."""
    plain = {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in state.items()}
    return ArrayRecord({name: encode(tensor) for name, tensor in plain.items()})


def to_states(content: RecordDict) -> dict[str, State]:
    """All array records of a message, by name."""
    return {name: {key: decode(array) for key, array in record.items()} for name, record in content.array_records.items()}
