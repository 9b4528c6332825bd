"""Check the names and numbers in a site's sheet before the site waits for runs."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError, listed, nearest
from fedloom.conf.plugins import is_reference, offered
from fedloom.conf.registry import Registry
from fedloom.sims.federation.sheets import SiteSheet

LEAST_MEMORY = 1.0  # GB: a ClientApp's imports need half of it
NOTHING = "none"  # of `publish`
LISTS = ("networks", "objectives", "optimizers", "strategies")  # keys of a sheet that hold names


def check_names(sheet: SiteSheet, where: str = "") -> None:
    """Raise UserError for a network, objective, optimiser, strategy or domain that is unknown and not `module:attribute`.

    Imports no code from outside. `where`: the dotted key of the sheet, for the message.
    """
    for key in LISTS:
        for index, name in enumerate(getattr(sheet, key)):
            if not is_reference(name) and name not in (known := _known(key)):
                raise _unknown(f"{where}{key}[{index}]", name, known)
    if sheet.domain:
        _check_domain(sheet.domain, f"{where}domain")
    if NOTHING in sheet.publish and len(sheet.publish) > 1:
        raise UserError(f"{where}publish: got [{', '.join(sheet.publish)}]; take [{NOTHING}], or only the parts")
    if set(Path(os.path.normpath(sheet.store)).parts) <= {"/", "//", ".", ".."}:
        raise UserError(f"{where}store: got '{sheet.store}', takes a folder of its own, such as store")
    if 0 < sheet.max_memory < LEAST_MEMORY:
        raise UserError(f"{where}max_memory: got {sheet.max_memory:g}, takes at least {LEAST_MEMORY:g} (GB); 0: the default")


def check_numbers(sheet: SiteSheet, known: int, where: str = "") -> None:
    """Raise UserError for a masked sum that the site requires and never has, with the keys of so many `known` sites."""
    needed = {"min_members": sheet.min_members if sheet.peers else 0, "min_known": sheet.min_known}
    if odd := next((key for key, number in needed.items() if number > known), ""):
        has = f"`peers` has the keys of {known} sites" if sheet.peers else "`peers` is empty"
        raise UserError(f"{where}{odd}: got {needed[odd]}, but {has}; lower it, or add keys to `peers`")


def data_path(domain: str) -> str:
    """Return the path in a domain such as images:PATH, with its query; empty for one without a path."""
    from fedloom.clients.data.found import has_path

    return domain.partition(":")[2] if has_path(domain) else ""


def _known(key: str) -> list[str]:
    """Return the valid names in a list of a sheet. Imports torch, so only sites with such lists call it."""
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


def _check_domain(domain: str, where: str) -> None:
    from fedloom.clients.data.domains import domain_names
    from fedloom.clients.data.found import KINDS, function_of

    kind, _, rest = domain.partition(":")
    if is_reference(function_of(domain)) or (kind in KINDS and rest):
        return
    names = [*domain_names(), *offered("domain")]
    if domain not in names:
        raise _unknown(where, domain, [*names, *(f"{kind}:PATH" for kind in KINDS)])


def _unknown(where: str, name: str, known: Iterable[str]) -> UserError:
    names = [*known, "module:attribute"]
    near = nearest(name.lower(), names)
    hint = f"; did you mean '{near}'?" if near else ""
    return UserError(f"{where}: got '{name}'{hint} (takes: {listed(name, names)})")
