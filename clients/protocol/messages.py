"""What server and sites say to each other: names of records and the conversion of states to Flower's arrays.

A message holds one record ORDER and array records; its reply holds array records and METRICS.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import get_origin

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedloom.clients.protocol.codec import decode
from fedloom.clients.protocol.packing import NONE, packed, unpacked
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

ORDER = "order"
CONFIG = "configuration"  # down: the configuration, to sites that may not have it yet
EXPECTED = "expected"  # down: what the records that are added up on the way must hold
TEXTS = (CONFIG, EXPECTED)
METRICS = "metrics"
TRAIN = "train"
EVALUATE = "evaluate"  # a kind of question: how good are the networks sent, or else the site's own, on the site's images
ENROL = "enrol"  # a kind of question: how many images the site has, and of which classes
ERASE = "erase"  # a kind of question: delete what you keep of the run; the site was forgotten
ERASED = ("files", "bytes")  # up: how much that was
CLASSES = "classes"  # up: the names of the site's classes, in the order of their numbers
QUERY = "query"
ASK = "query.ask"  # Flower's type of messages with a question other than TRAIN
WHO = "who"
PROTOCOL = 3  # rises when messages change: server and sites must have the same

MOST_ROUNDS = 999_999
KEPT_NAMES = ("memory.sqlite", "site.lock", "configurations", "privacy")  # of files and folders in a site's store
MOST_AGAIN = IDLE = 9
MOST_RECORDS = 16  # that are added up on the way
_RUN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ATTEMPT = re.compile(r"[0-9a-f]{0,32}")
_REQUEST = re.compile(r"[A-Za-z0-9._-]{0,100}")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,99}")

MEAN = "mean"  # down: the aggregate (of sum aggregation: the mean extractor and the shared head)
STAR = "star"  # down and up: the free aggregated network N*
SUBSET = "subset/"  # down: + site name: the mean without that site
BEFORE = "before"  # down, where nodes keep contributions: the one in the sum now, if the server has it
OWN = "own"  # down, to a site that lost its store: its last contribution
MODEL = "model"  # down: a network to measure; of several: + / and their number
RIGHT, TOTAL = "right", "total"  # up: right answers of the site's own network (right/ and a number: of one that was sent)
BY_CLASS = "by_class/"  # up: + one of these names: the same for the classes 0, 1, ...
LOST = "lost"  # up, alone: the site has no own state after the round that it should go on from
# kinds of questions of secure aggregation, and the records that go with them
SECURE_KEYS, SECURE_SHARES, SECURE_CONFIRM, SECURE_UNMASK = "secure_keys", "secure_shares", "secure_confirm", "secure_unmask"
SECURE_KINDS = (SECURE_KEYS, SECURE_SHARES, SECURE_CONFIRM, SECURE_UNMASK)
COMMITMENTS = "secure_commitments"  # up, beside SECURE_SHARES: hashes of all shares
BASES = "secure_bases"  # down: by name of a site, the round that it goes on from
SECURE_TRAINED = "secure_trained"  # up, beside a masked reply: a digest of what determined the training, signed
SUMMED_BEFORE = "summed_before"  # up, alone: what was trained is in a sum over other sites that was read already
BLAMED = "blamed"  # up, alone: the site whose shares are wrong
MASKED = "masked"  # up: the tensor, int64 [n], of each record of a masked reply
LIFT = "secure_lift"  # down: of sites that leave, the rounds whose masks this site has in common with them
UNKNOWN = "unknown"  # up, alone: the site has no configuration of that digest
SITE = "site"  # up: what the server keeps for this site and can subtract
COMPONENTS = "components"  # up: parts of its network that the site publishes
ROUND = "round"  # up: what is averaged over the replies of this round and kept for no site


@dataclass(frozen=True)
class TaskInstructions:
    """What a site is asked: a question of some `kind` in round `round`, on its own state after round `base` (0: none).

    `rounds` is the length of the learning rate's schedule, `members` the number of sites in the aggregate, `split` the
    images that EVALUATE looks at. `sums`: records that are added up on the way, and how often each counts (once, samples);
    `ledger` is the folder where whoever adds them up writes each contribution, `before` the file of the one in the sum now,
    which counts `weight` times. Where nodes keep contributions, `before` is a blob's digest, which the node `holder` has, or
    else the message holds it (BEFORE). `secure`: the attempt at a round of secure aggregation; what is in `sums` is masked.
    `request`: with ERASE, for which one.
    `again`: which other draw of the round's batches this is; 0: the first; IDLE: none, nobody trains.
    """

    config: str  # sha256 of the configuration's JSON (CONFIG)
    run: str  # identifies the run; the site's store is keyed by it
    site: int  # place in the roster
    round: int
    rounds: int
    base: int
    members: int
    kind: str = TRAIN
    split: str = ""
    sums: dict[str, str] = field(default_factory=dict)
    holder: str = ""
    slot: str = ""  # the record, of those in `sums`, that is the site's contribution
    ledger: str = ""
    before: str = ""
    weight: int = 0
    secure: str = ""
    again: int = 0
    request: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """What names the round's random draws."""
        return (str(self.round), f"again {self.again}") if self.again else (str(self.round),)

    def record(self) -> ConfigRecord:
        """As a Flower record."""
        return ConfigRecord({"json": json.dumps(asdict(self), separators=(",", ":"))})


_KINDS = {name: get_origin(kind) or kind for name, kind in TaskInstructions.__annotations__.items()}


def read_order(content: RecordDict) -> TaskInstructions:
    """The inverse of TaskInstructions.record, from a message's content. Raises UserError: some parts name files here."""
    try:
        order = TaskInstructions(**json.loads(str(content.config_records[ORDER]["json"])))
    except (KeyError, TypeError, ValueError):
        raise UserError("order: cannot be read; server and site need the same version of fedloom") from None
    if not all(type(getattr(order, name)) is kind for name, kind in _KINDS.items()):
        raise UserError("order: a part is of another type; server and site need the same version of fedloom")
    if not all(isinstance(part, str) for pair in order.sums.items() for part in pair) or len(order.sums) > MOST_RECORDS:
        raise UserError("order.sums: takes names of records")
    if not _RUN.fullmatch(order.run):
        raise UserError("order.run: is no name of a run (letters, digits, '-', '_' and '.')")
    if order.run.startswith(KEPT_NAMES):
        raise UserError("order.run: is the name of a file of the site's store; take another name")
    if not _DIGEST.fullmatch(order.config):
        raise UserError("order.config: is no sha256")
    if not _REQUEST.fullmatch(order.request):
        raise UserError("order.request: is not a valid name of a request (up to 100 letters, digits, '-', '_' and '.')")
    if not _KIND.fullmatch(order.kind):
        raise UserError("order.kind: is no kind of question (small letters, digits and '_')")
    if not _ATTEMPT.fullmatch(order.secure):
        raise UserError("order.secure: is no name of an attempt (up to 32 of 0-9 and a-f)")
    if not 1 <= order.round <= MOST_ROUNDS or not 0 <= order.base <= MOST_ROUNDS:
        raise UserError(f"order.round: is no round (1 to {MOST_ROUNDS})")
    if not 0 <= order.again <= MOST_AGAIN:
        raise UserError(f"order.again: got {order.again}, takes 0 to {MOST_AGAIN}")
    if order.rounds < 1:
        raise UserError(f"order.rounds: got {order.rounds}, takes at least 1")
    return order


def measured_record(number: int) -> str:
    """The record of one of several networks to measure."""
    return f"{MODEL}/{number}"


def right_of(record: str) -> str:
    """The name of the number of right answers of the network in such a record."""
    return RIGHT + record.removeprefix(MODEL)


def text_record(text: str) -> ArrayRecord:
    """A text as a record: large ones travel as arrays do, once to each worker."""
    return to_arrays({"text": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})


def text_of(record: ArrayRecord) -> str:
    """The inverse of text_record."""
    return bytes(decode(record["text"]).numpy()).decode()


def config_digest(text: str) -> str:
    """What names a configuration in orders."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_config_record(content: RecordDict, digest: str) -> str | None:
    """The configuration's JSON that a message brings; None if it brings none. UserError if it is not that of the digest."""
    if CONFIG not in content.array_records:
        return None
    try:
        text = text_of(content.array_records[CONFIG])
    except Exception:  # bytes from outside
        raise UserError("order.config: cannot be read; server and site need the same version of fedloom") from None
    if config_digest(text) != digest:
        raise UserError("order.config: is not the configuration that the order names")
    return text


def content_bytes(content: RecordDict) -> int:
    """Bytes of all arrays and texts of a message, whatever they are for."""
    arrays = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    others = [value for records in (content.config_records, content.metric_records) for record in records.values()
              for value in record.values()]  # fmt: skip
    return arrays + sum(len(value) if isinstance(value, str | bytes | list) else 8 for value in others)


def array_bytes(content: RecordDict) -> int:
    """Bytes of a message's states; what else is in it is small, or the configuration, which sites have but for once."""
    states = (record for name, record in content.array_records.items() if name not in (*TEXTS, BEFORE))
    return sum(len(array.data) for record in states for array in record.values())


def to_arrays(state: Mapping[str, Tensor], packing: str = NONE) -> ArrayRecord:
    """A state as a Flower record (bfloat16, which Flower cannot carry, as float32), packed as federation.packed says."""
    return packed(state, packing)


def to_states(content: RecordDict) -> dict[str, State]:
    """All array records of a message, by name, but for those that are texts."""
    records = ((name, record) for name, record in content.array_records.items() if name not in TEXTS)
    return {name: unpacked(record) for name, record in records}
