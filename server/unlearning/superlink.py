"""Empty the database of a SuperLink, which stores messages until they are delivered.

Fedloom's SuperLink overwrites what it deletes (SQLite's secure_delete). Its write-ahead log is emptied here, before a
request is certified and when a run ends.
"""

import contextlib
import sqlite3
import time
from pathlib import Path

from fedloom.conf.schema import Config

DATABASE, SHEET, SERVER = "state.db", "server.yaml", "server"  # files of a server's folder; that folder's name
WAIT_SECONDS = 5.0  # for messages to be confirmed, and for the SuperLink to let go of its log


def scrub(config: Config) -> str:
    """Empty the log of the SuperLink's database that engine.address names.

    Return a sentence on what may be left; empty if nothing is left, and for engines without a SuperLink.
    """
    if config.engine.name != "flower":
        return ""
    address = Path(config.engine.address)
    folders = [folder for folder in (address / SERVER, address) if (folder / SHEET).is_file()]
    if not folders:
        return ("the SuperLink's database is not on this machine, or belongs to Flower's own program: it may hold messages "
                "of the forgotten sites")  # fmt: skip
    path = folders[0] / DATABASE
    return scrubbed(path) if path.is_file() else ""


def scrubbed(path: Path) -> str:
    """Empty the log of a SuperLink's database. Return what may be left, as `scrub` does."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=1.0)) as database:
            deadline = time.monotonic() + WAIT_SECONDS
            while (remainder := _left(database, path)) and time.monotonic() < deadline:
                time.sleep(0.2)
            return remainder
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return f"the SuperLink's database cannot be opened ({error}): it may hold messages of the forgotten sites"


def _left(database: sqlite3.Connection, path: Path) -> str:
    """Return what is left now. Nodes confirm a message a moment after they received it, and only then it is deleted."""
    if undelivered := database.execute("SELECT count(*) FROM objects").fetchone()[0]:
        return (f"the SuperLink holds {undelivered} parts of messages that are not confirmed yet; it deletes them when the "
                "run ends, and then its log is emptied again")  # fmt: skip
    if database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        return (
            f"the log of the SuperLink's database ({path.name}-wal) is in use: it may hold messages of the forgotten sites"
        )
    return ""
