"""Names in a site's sheet that nothing goes by: found before the site waits for runs that it would refuse, or fail in."""

from collections.abc import Iterable
from typing import Any

from fedloom.conf.errors import UserError, listed, nearest
from fedloom.conf.plugins import is_reference, offered
from fedloom.conf.registry import Registry
from fedloom.sims.federation.sheets import SiteSheet

LISTS = ("networks", "objectives", "optimizers", "strategies")  # keys of a sheet that hold names


def check_names(sheet: SiteSheet, where: str = "") -> None:
    """UserError for a network, objective, optimiser, strategy or domain that is neither known nor `module:attribute`.

    Nothing from outside is imported. `where`: the dotted key that the sheet stands at.
    """
    for key in LISTS:
        for place, name in enumerate(getattr(sheet, key)):
            if not is_reference(name) and name not in (known := _known(key)):
                raise _odd(f"{where}{key}[{place}]", name, known)
    if sheet.domain:
        _check_domain(sheet.domain, f"{where}domain")


def _known(key: str) -> list[str]:
    """The names that a list of a sheet takes. Imports torch: only for sites that name something."""
    from fedloom.clients.networks import NETWORKS
    from fedloom.clients.objectives import OBJECTIVES
    from fedloom.clients.objectives.components.auxiliary import AUXILIARY
    from fedloom.clients.training.optimizers import OPTIMIZERS
    from fedloom.server.strategies import STRATEGIES

    kinds: dict[str, list[Registry[Any]]] = {
        "networks": [NETWORKS],
        "objectives": [OBJECTIVES, AUXILIARY],
        "optimizers": [OPTIMIZERS],
        "strategies": [STRATEGIES],
    }
    return [name for kind in kinds[key] for name in kind.names()]


def _check_domain(given: str, where: str) -> None:
    from fedloom.clients.data.domains import domain_names
    from fedloom.clients.data.found import KINDS

    kind, _, rest = given.partition(":")
    if is_reference(given) or (kind in KINDS and rest):
        return
    names = [*domain_names(), *offered("domain")]
    if given not in names:
        raise _odd(where, given, [*names, *(f"{kind}:PATH" for kind in KINDS)])


def _odd(where: str, given: str, known: Iterable[str]) -> UserError:
    names = [*known, "module:attribute"]
    near = nearest(given.lower(), names)
    hint = f"; did you mean '{near}'?" if near else ""
    return UserError(f"{where}: got '{given}'{hint} (takes: {listed(given, names)})")
