"""Requests to forget sites: which are valid, how they are queued, and what of a site is stored outside the ledger."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.clients.storage.states import staged_files
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config
from fedloom.server.ledger import Ledger, Request
from fedloom.server.ledger.request_queue import ID
from fedloom.server.run_folder.layout import (
    BASELINES,
    DATA,
    LOSSES,
    PLOTS,
    REPORT,
    RETRAINED,
    SITES,
    STAGING,
    STANDARDISATION,
    STATES,
    SUFFIXES,
    TABLE_FILES,
    links_in,
    own_in,
)

KIND = "unlearn"
RESTORE = "restore"  # option: rounds in which the remaining sites train the aggregate as one network
BACK, SHARE_BACK = "back", 0.5  # option: share of the way to the initial network, before these rounds; its default


def wants_training(config: Config, options: Mapping[str, Any]) -> bool:
    """Return whether a request with these options needs sites that train."""
    return config.federation.secure_aggregation or any(
        options.get(option) for option in (RESTORE, "repair", "rollback", "retrain", "recalibrate")
    )


def receive(
    ledger: Ledger, id: str, sites: Sequence[str], reason: str, options: dict[str, Any], by: str = "", alone: bool = False
) -> Request:
    """Queue a request to forget sites, and return it. This works while a server runs.

    Args:
        ledger: The run's ledger.
        id: The request's id. For a known id, the first request with it is returned.
        sites: The sites to forget.
        reason: The reason, for the certificate.
        options: The options, such as repair rounds.
        by: Who sends it, for the ledger and the certificate.
        alone: Whether to refuse it if another request for one of the sites is open.

    Raises:
        UserError: The request is not valid.
    """
    if (known := ledger.request(id)) is not None:
        return known
    if not ID.fullmatch(id):
        raise UserError(f"request id: got '{id}'; use up to 100 characters of A-Z, a-z, 0-9, '.', '_' and '-'")
    for name, text in {"reason": reason, "by": by}.items():
        if not _is_text(text):
            raise UserError(f"{name}: got {text!a}, which is not valid UTF-8 text")
    refuse(ledger, sites)
    return ledger.receive(id, KIND, sites, reason, options, by, alone)


def _is_text(text: str) -> bool:
    """Return whether the text can be written; bytes of a command line that are not UTF-8 cannot."""
    return text.encode(errors="ignore").decode() == text


def refuse(ledger: Ledger, sites: Sequence[str]) -> None:
    """Raise UserError if `sites` cannot be forgotten.

    One is unknown, double, forgotten, or the last; nothing is stored; or what is stored is elsewhere, behind a link.
    """
    known = ledger.sites()
    for index, name in enumerate(sites):
        if name not in known:
            raise unknown("site", name, known)
        if name in sites[:index]:
            raise UserError(f"the site '{name}' is named twice; name it once")
        if known[name]:
            raise UserError(f"the site '{name}' is already forgotten; `fedloom requests RUN` shows the request")
    if len(sites) >= sum(not forgotten for forgotten in known.values()):
        raise UserError("no site would be left: delete the run's folder instead")
    slots = next(ledger.events("created")).body.get("slots")  # missing in ledgers of earlier versions
    if not (ledger.last_round() is None or ledger.all_latest() if slots is None else slots):
        raise UserError(
            f"{ledger.folder}: the method stores no contributions, or strategy.forgettable is false, so no site can be "
            "subtracted; train again without it"
        )
    check_links([*_of_sites(ledger.folder, sites), *_of_all(ledger.folder)])


def check_links(paths: Sequence[Path]) -> None:
    """Raise UserError if one of the paths is or has a link: what it leads to may be anyone's, and is never deleted."""
    if link := next((link for path in paths for link in links_in(path)), None):
        raise UserError(f"{link}: is a link, so what it leads to is not deleted; put the files themselves in its place, and "
                        "ask again")  # fmt: skip


def left_of(folder: Path, request: Request, forgotten: Container[str]) -> list[Path]:
    """Return the paths that this machine stores for a request's sites outside the ledger.

    These are the sites' own stores, what workers wrote for them, and all networks, plots and tables (which are written
    anew). Baselines and networks retrained for other requests are included: they were trained with the sites, and nothing
    is subtracted from them. Only sites in `forgotten` count, as a site may have been readmitted.
    """
    paths = _of_sites(folder, [name for name in request.sites if name in forgotten])
    paths += [path for path in _of_all(folder) if path != folder / RETRAINED / request.id]
    kept = [folder / name for name in SUFFIXES if not own_in(folder, name)]  # has only the user's files
    return [path for path in paths if path.exists() and path not in kept]


def _of_sites(folder: Path, sites: Sequence[str]) -> list[Path]:
    """Return the paths of these sites' own stores, and of what workers wrote for them."""
    return [path for name in sites for path in (*(folder / SITES).glob(f"*/{name}"), *staged_files(folder / STAGING, name))]


def _of_all(folder: Path) -> list[Path]:
    """Return the paths of what was made from several sites."""
    paths = [folder / name for name in (STATES, BASELINES, STANDARDISATION, DATA, LOSSES, PLOTS, TABLE_FILES, REPORT)]
    return [*paths, *(path for path in (folder / RETRAINED).glob("*") if path.is_dir())]
