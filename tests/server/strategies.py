"""Parts of the tests of strategies: five sites, and replies that nobody trained."""

import functools
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fedloom.clients.networks.base import HEAD
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import ROUND, SITE
from fedloom.conf import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.rounds.server_state import ServerState
from tests.server.parts import (
    extractor,
    given,
    made_up,
    small,
    staged,
)

SUMMING = ["exact", "regularised", "independent"]
N = 5
LAYER = "extractor.0.weight"


def many(root: Path, mode: str = "exact", *overrides: str) -> Config:
    return small(root, f"objective.mode={mode}", *overrides, sites=N)


@functools.cache
def everyone() -> list[Site]:
    """The five sites; they are the same in all configurations here."""
    return many(Path()).roster


@functools.cache
def shapes(affine: bool = False) -> State:
    return initial_state(many(Path(), "exact", f"network.affine={str(affine).lower()}"))


def records(config: Config, name: str, round: int) -> dict[str, State]:
    """A made-up reply of a site, of the names and shapes that the mode asks for."""
    return _records(config.objective["mode"], config.network["affine"], name, round)


@functools.cache
def _records(mode: str, affine: bool, name: str, round: int) -> dict[str, State]:
    like = shapes(affine)
    mine, shared = made_up(like, name, round, SITE), made_up(like, name, round, ROUND)
    head = {key: tensor for key, tensor in shared.items() if key.startswith(HEAD)}
    return {
        "exact": {SITE: extractor(mine), ROUND: head},
        "regularised": {SITE: extractor(mine), ROUND: shared},
        "independent": {SITE: mine, ROUND: head},
        "fedavg": {ROUND: shared},
    }[mode]


def play(aggregate: ServerState, config: Config, rounds: list[list[int]]) -> None:
    """Rounds of made-up replies; each lists the sites that answer, in the order of their arrival."""
    members = {site.name for site in aggregate.setup.sites}
    for number, arrivals in enumerate(rounds, start=1):
        there = [everyone()[place] for place in arrivals if everyone()[place].name in members]
        assert staged(aggregate, number, [given(site, records(config, site.name, number)) for site in there]) == {}
        aggregate.commit(number, {})


# Each round: which sites answer, and in which order; site 0 always does, so that each round has a reply.
histories = st.lists(st.permutations(range(1, N)).flatmap(
    lambda order: st.integers(0, N - 1).map(lambda count: [0, *order[:count]])
), min_size=1, max_size=3)  # fmt: skip
hypothesis_on_disk = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
