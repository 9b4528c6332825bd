"""Names of the records in messages, the order to a site, and the conversion between states and Flower arrays.

A message holds one record ORDER and array records. Its reply holds array records and METRICS.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_origin

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedloom.clients.protocol.codec import decode, decode_again
from fedloom.clients.protocol.packing import NONE, packed, unpacked
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

ORDER = "order"
CONFIG = "configuration"  # down: the configuration, to sites that may not have it yet
EXPECTED = "expected"  # down: the expected contents of the records that a worker adds up
TEXTS = (CONFIG, EXPECTED)
METRICS = "metrics"
TRAIN = "train"
EVALUATE = "evaluate"  # question: accuracy of the networks in the message, or of the site's own, on the site's images
ENROL = "enrol"  # question: how many images the site has, and of which classes
ERASE = "erase"  # order: delete everything of this run, because the site was forgotten
ERASED = ("files", "bytes")  # up: how much was deleted
CLASSES = "classes"  # up: the names of the site's classes, in the order of their numbers
QUERY = "query"
ASK = "query.ask"  # Flower's type of messages with a question other than TRAIN
WHO = "who"
PROTOCOL = 6  # version of the messages: server and sites must have the same

MOST_ROUNDS = 999_999
KEPT_NAMES = (
    "memory.sqlite",
    "site.lock",
    "configurations",
    "privacy",
)  # files and folders in a site's store; no run has such a name
MOST_AGAIN = IDLE = 9
WHEN = ("before", "during", "after")  # when a site fails: before, in the middle of, or after its training
MOST_RECORDS = 16  # records that a worker adds up
_RUN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ATTEMPT = re.compile(r"[0-9a-f]{0,32}")
_REQUEST = re.compile(r"[A-Za-z0-9._-]{0,100}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,99}")

MEAN = "mean"  # down: the aggregate (of sum aggregation: the mean extractor and the shared head)
STAR = "star"  # down and up: the free aggregated network N*
SUBSET = "subset/"  # down: + site name: the mean without that site
BEFORE = "before"  # down, where nodes store contributions: the one now in the sum, if the server has it
OWN = "own"  # down, to a site that lost its store: its last contribution
MODEL = "model"  # down: a network to measure; if there are several: + / and a number
RIGHT, TOTAL = "right", "total"  # up: right answers of the site's own network (right/ and a number: of the message's)
SUMS = "sums"  # up: sums of metrics of the site's own network (sums/ and a number: of the message's)
BY_CLASS = "by_class/"  # up: + one of these names: the same for the classes 0, 1, ...
LOST = "lost"  # up, alone: the site lost its state of the round that it should continue from
# questions of secure aggregation, and their records
SECURE_KEYS, SECURE_SHARES, SECURE_CONFIRM, SECURE_UNMASK = "secure_keys", "secure_shares", "secure_confirm", "secure_unmask"
SECURE_KINDS = (SECURE_KEYS, SECURE_SHARES, SECURE_CONFIRM, SECURE_UNMASK)
COMMITMENTS = "secure_commitments"  # up, with SECURE_SHARES: hashes of all shares
BASES = "secure_bases"  # down: by name of a site, the round that it continues from
SECURE_TRAINED = "secure_trained"  # up, with a masked reply: a signed digest of everything that determined the training
SUMMED_BEFORE = "summed_before"  # up, alone: this training is already in an opened sum over other sites
BLAMED = "blamed"  # up, alone: the site whose shares are wrong
MASKED = "masked"  # up: the tensor, int64 [n], of each record of a masked reply
LIFT = "secure_lift"  # down: of sites that leave, the rounds whose masks this site shares with them
UNKNOWN = "unknown"  # up, alone: the site does not have the configuration with that digest
SITE = "site"  # up: the contribution that the server stores for this site and can subtract
COMPONENTS = "components"  # up: parts of its network that the site publishes
ROUND = "round"  # up: averaged over this round's replies, and stored for no site


@dataclass(frozen=True)
class TaskInstructions:
    """The server's order to a site: train, or answer a question.

    Where nodes store contributions, `before` is a contribution's digest. The node `holder` has it, or the message (BEFORE).
    """

    config: str  # sha256 of the configuration's JSON (CONFIG)
    run: str  # name of the run; the site's store is keyed by it
    site: int  # the site's index in the roster
    round: int
    rounds: int  # length of the learning rate's schedule
    base: int  # the site starts from its own state after this round; 0: from none
    members: int  # number of sites in the aggregate
    kind: str = TRAIN  # or the kind of question
    split: str = ""  # the images that EVALUATE looks at: validation or test
    sums: dict[str, str] = field(default_factory=dict)  # records that a worker adds up, and how often: once or samples
    holder: str = ""
    slot: str = ""  # the record, of those in `sums`, that is the site's contribution
    ledger: str = ""  # folder where the worker writes each contribution
    before: str = ""  # file of the contribution that is now in the sum
    weight: int = 0  # how often `before` counts in the sum
    secure: str = ""  # the attempt at a round of secure aggregation; the records in `sums` are then masked
    again: int = 0  # number of the redraw of the round's batches; 0: the first draw; IDLE: the site does not train
    fails: str = ""  # when the site fails in the round, one of WHEN (federation.dropout)
    request: str = ""  # with ERASE, the id of the request
    restoring: int = 0  # in a restoration of `rounds` rounds, the number of this one; 0: an ordinary round
    back: float = 0.0  # share of the way by which a network first moves back to its initial state

    @property
    def words(self) -> tuple[str, ...]:
        """The names that seed the round's random draws."""
        return (str(self.round), f"again {self.again}") if self.again else (str(self.round),)

    @property
    def schedule_round(self) -> int:
        """The round by which the learning rate's schedule counts."""
        return self.restoring or self.round

    def record(self) -> ConfigRecord:
        """Return the order as a Flower record."""
        return ConfigRecord({"json": json.dumps(vars(self), separators=(",", ":"))})


_KINDS = {name: get_origin(kind) or kind for name, kind in TaskInstructions.__annotations__.items()}


def read_order(content: RecordDict) -> TaskInstructions:
    """Read and check the order in a message's content. Raises UserError: some parts become file names at the site."""
    try:
        text = str(content.config_records[ORDER]["json"])
    except (KeyError, TypeError):
        raise UserError("order: cannot be read; server and site need the same version of fedloom") from None
    return _parsed_order(text)


@functools.lru_cache(maxsize=16)
def _parsed_order(text: str) -> TaskInstructions:
    try:
        order = TaskInstructions(**json.loads(text))
    except (TypeError, ValueError, RecursionError):
        raise UserError("order: cannot be read; server and site need the same version of fedloom") from None
    if not all(type(getattr(order, name)) is kind for name, kind in _KINDS.items()):
        raise UserError("order: a field has the wrong type; server and site need the same version of fedloom")
    if not all(isinstance(part, str) for pair in order.sums.items() for part in pair) or len(order.sums) > MOST_RECORDS:
        raise UserError(f"order.sums: takes names of at most {MOST_RECORDS} records")
    if not _RUN.fullmatch(order.run):
        raise UserError("order.run: is not a valid name of a run (letters, digits, '-', '_' and '.')")
    if order.run.startswith(KEPT_NAMES):
        raise UserError("order.run: the site's store uses this name; choose another name for the run")
    if not _DIGEST.fullmatch(order.config):
        raise UserError("order.config: is not a sha256")
    if not _REQUEST.fullmatch(order.request):
        raise UserError("order.request: is not a valid name of a request (up to 100 letters, digits, '-', '_' and '.')")
    if not _KIND.fullmatch(order.kind):
        raise UserError("order.kind: is not a valid kind of question (lower-case letters, digits and '_')")
    if not _ATTEMPT.fullmatch(order.secure):
        raise UserError("order.secure: is not a valid name of an attempt (up to 32 of 0-9 and a-f)")
    if not 1 <= order.round <= MOST_ROUNDS or not 0 <= order.base <= MOST_ROUNDS:
        raise UserError(f"order.round: got round {order.round} on base {order.base}, takes rounds 1 to {MOST_ROUNDS}")
    if not 0 <= order.again <= MOST_AGAIN:
        raise UserError(f"order.again: got {order.again}, takes 0 to {MOST_AGAIN}")
    if order.fails not in ("", *WHEN):
        raise UserError(f"order.fails: takes one of {', '.join(WHEN)}")
    if order.rounds < 1:
        raise UserError(f"order.rounds: got {order.rounds}, takes at least 1")
    if not 0 <= order.restoring <= order.rounds:
        raise UserError(f"order.restoring: got {order.restoring}, takes 0 to {order.rounds}")
    if not 0.0 <= order.back <= 1.0:
        raise UserError(f"order.back: got {order.back}, takes 0 to 1")
    return order


def measured_record(number: int) -> str:
    """Return the name of the record of a network to measure, when a message has several, numbered."""
    return f"{MODEL}/{number}"


def right_of(record: str) -> str:
    """Return the metric's name for the right answers of the network in the record with this name."""
    return RIGHT + record.removeprefix(MODEL)


def sums_of(record: str) -> str:
    """Return the record's name for the sums of the network in the record with this name."""
    return SUMS + record.removeprefix(MODEL)


def text_record(text: str) -> ArrayRecord:
    """Convert a text to an array record, since engines send arrays only once to each worker."""
    return to_arrays({"text": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})


def text_of(record: ArrayRecord) -> str:
    """Return the text of a record that text_record made."""
    return bytes(decode(record["text"]).numpy()).decode()


def config_digest(text: str) -> str:
    """Return the sha256 that names a configuration in orders."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_config_record(content: RecordDict, digest: str) -> str | None:
    """Return the configuration's JSON in a message, or None. Raises UserError if its sha256 is not the digest."""
    if CONFIG not in content.array_records:
        return None
    try:
        text = text_of(content.array_records[CONFIG])
    except Exception:  # bytes from outside
        raise UserError("order.config: cannot be read; server and site need the same version of fedloom") from None
    if config_digest(text) != digest:
        raise UserError("order.config: the configuration's sha256 is not the one in the order")
    return text


def content_bytes(content: RecordDict) -> int:
    """Return the size in bytes of all arrays and texts of a message."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    others = [value for records in (content.config_records, content.metric_records) for record in records.values()
              for value in record.values()]  # fmt: skip
    return arrays + sum(len(value) if isinstance(value, str | bytes | list) else 8 for value in others)


def array_bytes(content: RecordDict) -> int:
    """Return the size in bytes of a message's states, without the configuration, which is sent only once."""
    states = (record for name, record in content.array_records.items() if name not in (*TEXTS, BEFORE))
    return sum(len(array.data) for record in states for array in record.values())


def to_arrays(state: Mapping[str, Tensor], packing: str = NONE) -> ArrayRecord:
    """Convert a state to a Flower record, packed as federation.packed says. bfloat16 becomes float32 for Flower."""
    return packed(state, packing)


def to_states(content: RecordDict) -> dict[str, State]:
    """Return the states in a message by record name. Records that hold texts, such as the configuration, are left out."""
    records = ((name, record) for name, record in content.array_records.items() if name not in TEXTS)
    return {name: unpacked(record) for name, record in records}


def sent_states(content: RecordDict) -> dict[str, State]:
    """Return the same for a message to a site. A record that many sites receive is decoded once, and then copied."""
    records = ((name, record) for name, record in content.array_records.items() if name not in TEXTS)
    return {name: decode_again(record, unpacked) for name, record in records}
