"""What the sites have sent in one attempt at a masked sum."""

from dataclasses import dataclass, field

from torch import Tensor

from fedloom.clients.privacy.secure_aggregation.primitives import (
    SIGNATURE,
    PublicKeys,
    history_words,
    is_signature,
    trained_words,
)
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.fusion.state import State
from fedloom.server.rounds.masked_replies import read_bytes

DIGEST = 32  # bytes


@dataclass(frozen=True)
class Trained:
    """What a site signs with its contribution: digests of what determined its training, and of the state before it."""

    digest: bytes
    history: bytes
    words: bytes  # both signatures

    @staticmethod
    def read(answers: "MaskedAnswers", name: str, record: State) -> "Trained":
        """Return a site's digests and signatures from its record. Raises ReplyError unless both signatures are valid."""
        digest, history = (read_bytes(record, part, DIGEST) for part in ("digest", "history"))
        signatures = [read_bytes(record, part, SIGNATURE) for part in ("signature", "history_signature")]
        texts = trained_words(answers.id, digest.hex()), history_words(answers.id, history)
        if not all(is_signature(answers.keys[name].signing, *pair) for pair in zip(texts, signatures, strict=True)):
            raise ReplyError("its signature of its training is wrong")
        return Trained(digest, history, b"".join(signatures))


@dataclass
class MaskedAnswers:
    """What the sites have sent in one attempt at a masked sum. Dictionaries are by site.

    Attributes:
        id: The attempt's id.
        keys: The public keys.
        signatures: The signatures of these keys, which other sites check.
        sealed: The encrypted shares, by sender and receiver.
        commitments: The commitments to all shares of a site's secrets: own, pair.
        samples: The number of training examples.
        numbers: Other numbers of the reply.
        vectors: The masked records.
        trained: The signed digests of what determined the training.
        signed: The signatures of the list of sites that count.
        shares: The shares of one of the site's secrets, by index.
        helped: The sites that sent such shares.
        refusing: The sites that refuse to let the sum be read.
        blamed: The sites that report the site's shares as wrong.
    """

    id: str
    keys: dict[str, PublicKeys] = field(default_factory=dict)
    signatures: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commitments: dict[str, dict[str, bytes]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    vectors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    trained: dict[str, "Trained"] = field(default_factory=dict)
    signed: dict[str, bytes] = field(default_factory=dict)
    shares: dict[str, dict[int, bytes]] = field(default_factory=dict)
    helped: set[str] = field(default_factory=set)
    refusing: list[str] = field(default_factory=list)
    blamed: dict[str, set[str]] = field(default_factory=dict)

    def kind(self, name: str) -> str:
        """Return which secret of a site the server rebuilds: of its 'own' mask if it counts, else of its 'pair' masks."""
        return "own" if name in self.vectors else "pair"
