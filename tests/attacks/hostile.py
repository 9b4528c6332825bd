"""A server that does not keep to the protocol, against the real code of sites of a real federation, in this process."""

import functools
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedloom.clients.app import app
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.privacy.secure_aggregation.contribution import flat
from fedloom.clients.privacy.secure_aggregation.primitives import (
    KEY,
    PUBLIC,
    PublicKeys,
    agreed,
    mask,
    places,
    rebuilt,
    sign,
    threshold_of,
)
from fedloom.clients.protocol.messages import (
    ASK,
    BASES,
    COMMITMENTS,
    CONFIG,
    LIFT,
    MASKED,
    MEAN,
    ORDER,
    ROUND,
    SECURE_CONFIRM,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_TRAINED,
    SECURE_UNMASK,
    SITE,
    TRAIN,
    TaskInstructions,
    config_digest,
    text_record,
    to_arrays,
    to_states,
)
from fedloom.clients.protocol.partial_sums import ONCE
from fedloom.clients.storage.sent import Sent
from fedloom.clients.storage.store import SiteStore
from fedloom.conf import Config, load, to_json
from fedloom.sims.engines.adapter import site_context, take_identity
from tests.node_keys import write_node_key

SITES = 10
WORDS = (
    f"sites=[{{domain: digits, count: {SITES}}}]",
    "data.size=8",
    "network={name: mlp, widths: [4]}",
    "training.batch=32",
    "objective={name: fedavg}",
    "strategy={name: sum_aggregation}",
)
MASKS = (*WORDS, "federation.secure_aggregation=true")


class Refused(Exception):
    """A site has answered with an error, or with a record that says why it does not answer."""


@functools.lru_cache(maxsize=100)
def configured(words: tuple[str, ...]) -> tuple[Config, str]:
    """The configuration of these words, and its text. A hostile server takes another one with each message."""
    config = load("digits", words)
    return config, to_json(config)


def name_of(site: int) -> str:
    return f"site-{site:04d}"


class Server:
    """Sites with keys, whose stores are in a folder; orders of any kind for any of them."""

    def __init__(
        self, folder: Path, words: Sequence[str] = MASKS, sites: int = SITES, keys: bool = True, **policy: Any
    ) -> None:
        take_identity()
        self.folder, self.sites, self.policy = folder, sites, dict(policy)
        self.keys = _keys(folder / "keys", sites) if keys else {}
        self.change(*words)
        self.run = "run"

    def change(self, *words: str) -> None:
        """Take another configuration."""
        self.words, (self.config, self.text) = words, configured(words)

    @property
    def mean(self) -> dict[str, Tensor]:
        """The first network that all share."""
        return initial_state(self.config)

    def order(self, site: int, kind: str, **parts: Any) -> TaskInstructions:
        made = {"config": config_digest(self.text), "run": self.run, "site": site, "round": 1, "rounds": 1, "base": 0,
                "members": self.sites, "kind": kind, **parts}  # fmt: skip
        return TaskInstructions(**made)

    def reply(
        self, site: int, kind: str, records: Mapping[str, Mapping[str, Tensor]] | None = None, **parts: Any
    ) -> Message:
        """What a site says to an order."""
        content: dict[str, Any] = {name: to_arrays(state) for name, state in (records or {}).items()}
        content |= {ORDER: self.order(site, kind, **parts).record(), CONFIG: text_record(self.text)}
        message = Message(RecordDict(content), 2 + site, "train" if kind == TRAIN else ASK)
        message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
        context = site_context(site, self.sites, "")
        store = str(self.folder / "stores" / name_of(site))
        context.node_config = {"site": name_of(site), "store": store, **self.keys.get(site, {}), **self.policy}
        return app(message, context)

    def ask(
        self, site: int, kind: str, records: Mapping[str, Mapping[str, Tensor]] | None = None, **parts: Any
    ) -> RecordDict:
        """The same; Refused for an error."""
        reply = self.reply(site, kind, records, **parts)
        if reply.has_error():
            raise Refused(f"{name_of(site)} {kind}: {reply.error.reason}")
        for name, record in reply.content.config_records.items():
            if name in ("summed_before", "blamed", "unknown", "lost"):
                raise Refused(f"{name_of(site)} {kind}: {name} {dict(record)}")
        return reply.content

    def gave(self, site: int, run: str = "", round: int = 1) -> Tensor:
        """What a site has given to a sum, as a vector: its own store says so."""
        store = SiteStore(self.folder / "stores" / name_of(site), run or self.run, name_of(site))
        return flat(Sent(store).summed(round))


class Masks:
    """An attempt at a masked sum, played step by step, so that a step can be played wrongly."""

    def __init__(
        self, server: Server, asked: Sequence[int], bases: Mapping[int, int] | None = None,
        words: Mapping[int, Sequence[str]] | None = None, **parts: Any,
    ) -> None:  # fmt: skip
        """`words`: of single sites the configuration that they hear of."""
        self.server, self.asked, self.id, self.bases = server, list(asked), uuid.uuid4().hex, dict(bases or {})
        self.words = words or {}
        self.parts = {"secure": self.id, **parts}
        self.keys: dict[int, Tensor] = {}
        self.sealed: dict[int, dict[str, Tensor]] = {}
        self.committed: dict[int, dict[str, Tensor]] = {}
        self.vectors: dict[int, dict[str, Tensor]] = {}
        self.trained: dict[int, Tensor] = {}
        self.signed: dict[int, Tensor] = {}
        self.lists: dict[int, list[int]] = {}
        self.shares: dict[tuple[int, bool], dict[int, bytes]] = {}
        self.metrics: dict[int, Mapping[str, Any]] = {}

    def ask(self, site: int, *given: Any, **parts: Any) -> RecordDict:
        """Server.ask, with the configuration that the site hears of."""
        usual = self.server.words
        self.server.change(*self.words.get(site, usual))
        try:
            return self.server.ask(site, *given, **{**self.parts, **parts})
        finally:
            self.server.change(*usual)

    def begin(self) -> "Masks":
        """Keys and shares."""
        for site in self.asked:
            self.keys[site] = to_states(self.ask(site, SECURE_KEYS))[SECURE_KEYS]["keys"]
        sent = {SECURE_KEYS: {name_of(site): one for site, one in self.keys.items()}}
        for site in self.asked:
            answer = to_states(self.ask(site, SECURE_SHARES, sent))
            self.sealed[site], self.committed[site] = answer[SECURE_SHARES], answer[COMMITMENTS]
        return self

    def train(self, sites: Sequence[int] | None = None, lift: Mapping[str, Tensor] | None = None, **parts: Any) -> "Masks":
        """Masked contributions."""
        place = places(map(name_of, self.asked))
        for site in self.asked if sites is None else sites:
            at = place[name_of(site)]
            shares = {name_of(other): torch.cat([one[name_of(site)], *(self.committed[other][kind][KEY * (at - 1) : KEY * at]
                      for kind in ("own", "pair"))]) for other, one in self.sealed.items() if other != site}  # fmt: skip
            bases = {name_of(one): torch.tensor([self.bases.get(one, 0)]) for one in self.sealed}
            records: dict[str, Mapping[str, Tensor]] = {SECURE_SHARES: shares, BASES: bases, MEAN: self.server.mean}
            records |= {LIFT: lift} if lift is not None else {}
            both = self.server.config.objective["name"] == "sum_aggregation"  # a part of the network is a record of its own
            whole = {"sums": dict.fromkeys([ROUND, SITE] if both else [SITE], ONCE), "slot": SITE}
            content = self.ask(site, TRAIN, records, **{**whole, "base": self.bases.get(site, 0), **parts})
            states = to_states(content)
            self.vectors[site] = {name: state[MASKED] for name, state in states.items() if MASKED in state}
            self.trained[site] = torch.cat([states[SECURE_TRAINED][part] for part in ("signature", "history_signature")])
            self.metrics[site] = dict(content["metrics"])  # type: ignore[arg-type]
        return self

    def confirm(self, lists: Mapping[int, Sequence[int]] | None = None) -> "Masks":
        """Signed lists of the sites that count; `lists`: another one for each site."""
        for site in self.vectors:
            counted = list(lists[site]) if lists else list(self.vectors)
            counts = {name_of(one): torch.tensor([one in counted], dtype=torch.uint8) for one in self.sealed}
            trained = {name_of(one): word for one, word in self.trained.items()}
            records = {SECURE_CONFIRM: counts, SECURE_TRAINED: trained}
            answer = to_states(self.ask(site, SECURE_CONFIRM, records))
            self.signed[site], self.lists[site] = answer[SECURE_CONFIRM]["signature"], counted
        return self

    def unmask(self) -> "Masks":
        """Shares of secrets."""
        place, signed = places(map(name_of, self.asked)), {name_of(site): one for site, one in self.signed.items()}
        for site in self.signed:
            content = self.ask(site, SECURE_UNMASK, {SECURE_UNMASK: signed})
            for name, share in to_states(content)[SECURE_UNMASK].items():
                key = int(name.removeprefix("site-")), int(name.removeprefix("site-")) in self.lists[site]
                self.shares.setdefault(key, {})[place[name_of(site)]] = bytes(share.numpy())
        return self

    def total(self, sites: Sequence[int] | None = None) -> Tensor:
        """The sum over these sites of what they gave. Refused if masks cannot be taken off."""
        sites = list(self.vectors) if sites is None else list(sites)
        public = {site: PublicKeys.read(bytes(one[:PUBLIC].numpy())) for site, one in self.keys.items()}
        words = self.server.run, str(self.parts.get("round", 1)), self.id
        whole = torch.zeros_like(self.vectors[sites[0]][SITE])
        for site in sites:
            vector = self.vectors[site][SITE].clone()
            vector -= mask(self._secret(site, True), SITE, len(vector))
            for gone in self.sealed.keys() - set(sites):
                key = agreed(self._secret(gone, False), public[site].pair, *words)
                vector -= sign(name_of(site), name_of(gone)) * mask(key, SITE, len(vector))
            whole = whole + vector
        return whole

    def _secret(self, site: int, own: bool) -> bytes:
        shares = self.shares.get((site, own), {})
        needed = threshold_of(self.server.config.federation.secure_threshold, len(self.asked))
        if len(shares) < needed:
            raise Refused(f"{len(shares)} shares of {name_of(site)}'s secret, {needed} are needed")
        return rebuilt(dict(list(shares.items())[:needed]))


def summed(server: Server, asked: Sequence[int], counted: Sequence[int] | None = None, run: str = "", **more: Any) -> Tensor:
    """The sum of an attempt at which only `counted` send their contributions."""
    before, server.run = server.run, run or server.run
    try:
        lift, slot = more.pop("lift", None), {"slot": more.pop("slot")} if "slot" in more else {}
        return Masks(server, asked, **more).begin().train(counted, lift, **slot).confirm().unmask().total()
    finally:
        server.run = before


def _keys(folder: Path, sites: int) -> dict[int, dict[str, str]]:
    """By site what its node-config says of keys: its private one, and the public ones of all."""
    public = {}
    for site in range(sites):
        (folder / name_of(site)).mkdir(parents=True, exist_ok=True)
        public[name_of(site)] = write_node_key(folder / name_of(site))
    (folder / "peers").write_text("".join(f"{name} {key}\n" for name, key in public.items()))
    return {site: {"identity": str(folder / name_of(site) / "key"), "peers": str(folder / "peers")} for site in range(sites)}
