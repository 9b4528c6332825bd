"""The interface of a strategy, the check that every reply passes, and the registry of strategies."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from clients.data import num_classes
from clients.networks import build_network
from conf import to_yaml
from conf.errors import UserError, unknown
from conf.registry import Registry
from conf.schema import Config
from conf.sites import Site
from fusion.exact import State
from server.evaluate import Evaluator
from server.ledger import Ledger


class ReplyError(ValueError):
    """A reply that cannot be used; the message says why."""


@dataclass(frozen=True)
class Setup:
    """What a strategy starts from: the configuration, all sites, the run's ledger (None: a new one in `folder`).

    `evaluator` measures combinations on validation images; None: a new one where one is needed.
    """

    config: Config
    sites: list[Site]
    folder: Path
    ledger: Ledger | None = None
    evaluator: Evaluator | None = None

    def measuring(self) -> Evaluator:
        """The evaluator."""
        return self.evaluator or Evaluator(self.config)

    def opened(self) -> Ledger:
        """The ledger."""
        names = [site.name for site in self.sites]
        bits = self.config.federation.scale_bits
        return self.ledger or Ledger.create(self.folder, "", to_yaml(self.config), bits, names)


@dataclass(frozen=True)
class Turn:
    """Who is asked in a round, and the round that it is to them."""

    sites: list[Site]
    round: int


class Aggregation(ABC):
    """A strategy at work: the server's state of one run. A round is staged by `fold` and made valid by `commit`."""

    @abstractmethod
    def members(self) -> list[Site]:
        """The sites that take part: all but those that are forgotten."""

    def check_names(self, names: Sequence[str]) -> None:
        """UserError unless each is a member, named once."""
        known = [site.name for site in self.members()]
        for place, name in enumerate(names):
            if name not in known:
                raise unknown("site", name, known)
            if name in names[:place]:
                raise UserError(f"the site '{name}' is named twice")

    def length(self, rounds: int) -> int:
        """How many rounds the method takes if each site trains for `rounds`."""
        return rounds

    def turn(self, round: int) -> Turn | None:
        """Whose turn it is; None: a sample of the members, whose round is the server's."""
        return None

    @abstractmethod
    def records(self, round: int) -> dict[str, ArrayRecord]:
        """What every site gets in this round. The same objects go into every message, so engines ship them once."""

    @abstractmethod
    def base(self, site: Site) -> int:
        """The round after which the site's own state is valid; 0 if it has none."""

    @abstractmethod
    def fold(self, site: Site, round: int, records: dict[str, State], samples: int) -> None:
        """Take one reply in. Raises ReplyError, and then changes nothing, if it cannot be used."""

    def staging(self) -> str:
        """Where workers that add up contributions write each of them; empty if the method has no partial sums."""
        return ""

    def before(self, site: Site) -> str:
        """The file of the site's contribution to the present sum; empty if there is none."""
        return ""

    def fold_partial(self, site: Site, round: int, records: dict[str, State], addends: int, samples: int) -> None:
        """Take in a partial sum of `addends` replies (0: another reply carries this site's). Raises ReplyError."""
        raise ReplyError("this strategy takes no partial sums")

    @abstractmethod
    def commit(self, round: int, record: dict[str, Any]) -> None:
        """Make the round's replies valid, in one step with the round's record."""

    @abstractmethod
    def forget(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        """Take sites out, and commit it; `body` goes into the event, which answers `request`. UserError if it cannot."""

    @abstractmethod
    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        """UserError if these sites cannot be taken out, or (`rollback`) it cannot go back to before they took part."""

    def roll_back(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        """Go back to the round before the first of these sites took part, as `forget`. UserError if the method cannot."""
        raise UserError("this strategy cannot go back to an earlier round")

    def restart(self, site: Site) -> State | None:
        """What a site that lost its own state can begin with (float32); None if the server keeps nothing of it."""
        return None

    @abstractmethod
    def abandon(self) -> None:
        """Forget the replies since the last commit."""

    @abstractmethod
    def aggregate(self) -> State:
        """The aggregated network's state."""

    @abstractmethod
    def row(self) -> str:
        """The aggregate's name in tables: sum, fedavg, ..."""

    def extra(self) -> dict[str, State]:
        """Further networks worth measuring, by name."""
        return {}

    def reversed(self) -> State | None:
        """The aggregated network, its sites added in reverse order; None where the method does not sum."""
        return None

    def site(self, name: str) -> State | None:
        """The state of a site's own network, None where the method has none."""
        return None

    def without(self, names: list[str]) -> State | None:
        """The aggregated network without these sites, None where the method cannot take them out."""
        return None

    def only(self, names: Sequence[str]) -> State | None:
        """The aggregated network of these sites alone, None where the method cannot take the others out.

        UserError for a name that is unknown or repeated.
        """
        self.check_names(names)
        return self.without([site.name for site in self.members() if site.name not in names])

    def traces(self, names: Sequence[str] = ()) -> dict[str, str]:
        """Where these forgotten sites (none named: any that will be) may leave traces after subtraction, and why."""
        return {}

    def facts(self) -> dict[str, Any]:
        """What else the summary says of the method, by key."""
        return {}

    def summed(self) -> list[str]:
        """The names of the tensors that are summed exactly; none where the method does not sum."""
        return []

    def digest(self) -> dict[str, str]:
        """Digests of the exact states, by name."""
        return {}

    def checks(self) -> dict[str, bool]:
        """Facts about this very run that were computed, not assumed."""
        return {}


@dataclass(frozen=True)
class Strategy(ABC):
    """The options of a strategy; `start` puts it to work."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """UserError for a configuration that the method cannot work with."""

    @abstractmethod
    def start(self, setup: Setup) -> Aggregation:
        """Begin a run."""


STRATEGIES: Registry[Strategy] = Registry("strategy")


def check_objective(config: Config, name: str) -> None:
    """UserError unless the sites' objective is the one of that name."""
    if (given := config.objective.get("name")) != name:
        raise UserError(f"objective.name: got '{given}', strategy {config.strategy.get('name')} takes {name}")


def counter(config: Config) -> str:
    """The first integer tensor of the configured network, which is a counter of BatchNorm's; empty if there is none."""
    state = build_network(config, num_classes(config)).state_dict()
    return next((name for name, tensor in state.items() if tensor.dtype == torch.int64), "")


def check_record(
    kind: str, given: Mapping[str, Tensor] | None, expected: Mapping[str, Tensor], integers: bool | None = None
) -> None:
    """Names, shapes and kinds of number of a reply's record. Raises ReplyError naming the record and the tensor.

    `integers`: whether all are (int64) or none is; None: those that are in `expected`.
    """
    if given is None:
        raise ReplyError(f"the reply has no record '{kind}'")
    if missing := expected.keys() - given.keys():
        raise ReplyError(f"record '{kind}' lacks the tensor '{min(missing)}'")
    if odd := given.keys() - expected.keys():
        raise ReplyError(f"record '{kind}' has an unknown tensor '{min(odd)}'")
    for name, tensor in given.items():
        whole = expected[name].dtype == torch.int64 if integers is None else integers
        if tensor.dtype != torch.int64 if whole else not tensor.dtype.is_floating_point:
            wanted = "int64" if whole else "floating point"
            raise ReplyError(f"record '{kind}', tensor '{name}': {tensor.dtype}, expected {wanted}")
        if tensor.shape != expected[name].shape:
            raise ReplyError(
                f"record '{kind}', tensor '{name}': shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
            )
