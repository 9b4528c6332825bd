"""Copy a run, also while it trains: the ledger as of one event, and the files that belong to it."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import AWAY, check
from fedloom.server.ledger.connection import Connection
from fedloom.server.ledger.database import LEDGER, reading, sqlite_errors
from fedloom.server.run_folder.folder import read_config
from fedloom.server.run_folder.layout import LOCK, SEAL, STAGING

TRIES = 10
LEFT_OUT = {LOCK, SEAL, STAGING, *(f"{LEDGER}-{part}" for part in ("wal", "shm", "journal"))}  # of the running server


def backup(path: Path, out: Path) -> int:
    """Copy a run to the new folder `out`, check the copy's ledger, and return its last round.

    Raises UserError if `out` exists or is inside the run, the copy has a fault, or a server commits during every try.
    """
    read_config(path)
    if out.exists():
        raise UserError(f"{out}: exists already; name a new folder")
    if out.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{out}: is inside the run, so forgetting a site would miss it; name a folder outside")
    beside = path.resolve() if os.access(path.resolve().parent, os.W_OK) else out  # links need the run's own disk
    held, new = (place.with_name(f".{place.name}.backup-{uuid.uuid4().hex[:12]}") for place in (beside, out))
    try:
        _hold(path, held)
        shutil.copytree(held, new, symlinks=True)
        found = (fault for fault in check(new) if fault.severity == "problem" or fault.what == AWAY)
        if faults := [f"{fault.file}: {fault.what}" for fault in found]:
            raise UserError(f"{path}: the copy has a fault ({faults[0]}); run `fedloom ledger {path} --check`")
        new.rename(out)
    except (OSError, shutil.Error) as error:
        raise UserError(
            f"{out}: the copy failed ({getattr(error, 'strerror', None) or error}); nothing is written"
        ) from None
    finally:
        for left in (held, new):
            shutil.rmtree(left, ignore_errors=True)
    with Ledger.open(out, server=False) as ledger:
        last = ledger.last_round()
    return last.round if last else 0


def _hold(path: Path, held: Path) -> None:
    """Fill a new folder with the run's files of one moment, so that a server cannot remove them."""
    for _ in range(TRIES):
        before = _events(path)
        _link_all(path, held)
        if _events(path) == before:
            return
        shutil.rmtree(held)
    raise UserError(f"{path}: a server commits round after round; try again later, or stop the run first")


def _events(path: Path) -> dict[Path, str]:
    """Return the digest of the last event of each ledger: the run's and its baselines'."""
    found = {}
    for file in path.rglob(LEDGER):
        with Ledger.open(file.parent, server=False) as ledger:
            found[file] = event.digest if (event := ledger.newest()) else ""
    return found


def _link_all(path: Path, held: Path) -> None:
    for file in _files(path):
        target = held / file.relative_to(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile: the ledger no longer refers to it
            if file.name == LEDGER:
                with sqlite_errors(file), closing(reading(file)) as source, closing(Connection(target, "mode=rwc")) as copy:
                    source.backup(copy)
            elif file.suffix == ".safetensors" and not file.is_symlink():
                _link(file, target)  # such files are never changed, only replaced
            else:
                shutil.copy2(file, target, follow_symlinks=False)


def _files(path: Path) -> Iterator[Path]:
    """Yield a run's files, without those of a write that is not complete."""
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        yield from (Path(folder) / name for name in names if name not in LEFT_OUT and not name.startswith("."))


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copy2(file, target)
