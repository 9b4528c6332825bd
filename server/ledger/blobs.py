"""Content-addressed states on disk: a file's name is the sha256 of its bytes, so no file is ever overwritten."""

import errno
import functools
import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from fedloom.clients.storage.states import safetensors_of, state_in, write_bytes
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

SYNCS = 8  # files that are flushed to disk at the same time
_BLOB = re.compile(r"([0-9a-f]{64})\.safetensors")
_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "; free space and run again: what was committed is safe"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; check its permissions"),
    errno.EIO: "; check this disk, then resume",
}


class LedgerError(UserError):
    """A ledger that cannot be read or written, or a request that does not fit its state."""


class NodeLostError(LedgerError):
    """A node of the cluster that stored contributions is gone."""


UNREADABLE = "its last contribution cannot be read"  # the reason in a reply; the server then asks the node what it still has


class RemoteBlobStore(Protocol):
    """Contributions that nodes of a cluster store (federation.node_store). All methods except `look` raise NodeLostError."""

    def look(self) -> bool:
        """Return whether contributions may have been lost since the last call."""
        ...

    def doubt(self) -> None:
        """Make the next `look` check again, because a contribution could not be read."""
        ...

    def names(self) -> set[str]:
        """Return the digests of all stored contributions."""
        ...

    def holder(self, digest: str) -> str:
        """Return the node that has the contribution; empty if none has it."""
        ...

    def get(self, digest: str) -> bytes:
        """Return the bytes of a contribution."""
        ...

    def add_up(self, partials: Any) -> Any:
        """Merge several partial sums of one node (clients.protocol.partial_sums.PartialSum) into one."""
        ...

    def summed(self, row: Any, names: Any, given: Any, bits: int) -> Any:
        """Add up contributions that nodes store. Arguments as in server.ledger.sums.added_up."""
        ...

    def remove(self, digests: Collection[str]) -> None:
        """Delete these contributions. Skip those on nodes that do not answer."""
        ...

    def end(self) -> None:
        """Remove all contributions from the nodes."""
        ...


@contextmanager
def ledger_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a LedgerError that names the file."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        raise LedgerError(f"{error.filename or path}: {error.strerror or error}{hint}") from None


@dataclass(frozen=True)
class Blobs:
    """The states (blobs) in `folder`, each in a file <sha256>.safetensors, which is written completely or not at all.

    `flush` makes contents and names survive a loss of power, for all files of a round at once. A file that was never
    flushed may be torn after a loss of power. Nothing refers to it, and the next `put` of the same state writes it again.
    """

    folder: Path
    elsewhere: RemoteBlobStore | None = None

    def has(self, digest: str) -> bool:
        """Return whether the blob with this digest is in the folder, or on a node."""
        return self.path(digest).is_file() or bool(self.holder(digest))

    def holder(self, digest: str) -> str:
        """Return the node that stores the blob instead of this folder; empty if none does."""
        return self.elsewhere.holder(digest) if self.elsewhere is not None else ""

    def bring_home(self, digests: Iterable[str]) -> int:
        """Copy these blobs from the nodes into the folder, remove all from the nodes, and return how many were copied."""
        if self.elsewhere is None:
            return 0
        away = sorted(digest for digest in set(digests) if self.holder(digest) and not self.path(digest).is_file())
        for digest in away:
            with ledger_errors(self.path(digest)):
                write_bytes(self.path(digest), self._content(digest), durable=False, private=True)
        self.flush(away)
        self.elsewhere.end()
        return len(away)

    def put(self, state: State) -> str:
        """Write a state, unless it exists, and return its digest. Raises LedgerError if the disk refuses it."""
        content = safetensors_of(state)
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        with ledger_errors(path):
            if not self._whole(digest):
                write_bytes(path, content, durable=False, private=True)
        return digest

    def adopt(self, path: Path, digest: str = "") -> str:
        """Move a complete file into the blobs and return its digest. It must be on the same file system.

        `digest`: the one that its writer has computed. Raises LedgerError if the file cannot be moved.
        """
        with ledger_errors(path):
            digest = digest or file_digest(path)
            target = self.path(digest)
            if not self._whole(digest):
                self.folder.mkdir(parents=True, exist_ok=True)
                os.rename(path, target)
            elif not target.samefile(path):
                path.unlink()
        return digest

    def _whole(self, digest: str) -> bool:
        """Return whether the blob exists and its bytes match its name."""
        path = self.path(digest)
        return path.is_file() and file_digest(path) == digest

    def flush(self, digests: Iterable[str]) -> None:
        """Flush these blobs to disk, before anything refers to them. Raises LedgerError naming a blob that is missing."""
        paths = [self.path(digest) for digest in digests if not self.holder(digest)]
        for path in paths:
            if not path.is_file():
                raise LedgerError(f"{path}: this blob is missing; write it before the commit")
        if self.folder.is_dir():
            with ledger_errors(self.folder):
                share = -(-len(paths) // SYNCS) or 1
                parts = [paths[begin : begin + share] for begin in range(0, len(paths), share)]
                list(_threads().map(_sync_all, parts))  # at once: the disk's journal groups them
                sync(self.folder)

    def get(self, digest: str) -> State:
        """Return the state with this digest. Raises LedgerError naming a file that is missing or damaged."""
        try:
            return state_in(self._content(digest))
        except SafetensorError as error:
            raise LedgerError(f"{self.path(digest)}: is not a readable safetensors file ({error})") from None

    def _content(self, digest: str) -> bytes:
        path = self.path(digest)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if self.elsewhere is None or not self.holder(digest):
                raise LedgerError(f"{path}: this blob is missing; restore it from a copy of the run, or if a node of a "
                                  "cluster stores it (federation.node_store), resume the run there") from None  # fmt: skip
            content = self.elsewhere.get(digest)
        except OSError as error:
            raise LedgerError(f"{path}: cannot be read ({error.strerror or error})") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise LedgerError(f"{path}: is damaged: its sha256 is not its name; restore it from a copy of the run")
        return content

    def path(self, digest: str) -> Path:
        """Return the path of a digest's blob, whether it exists or not."""
        return self.folder / f"{digest}.safetensors"

    def names(self) -> set[str]:
        """Return the digests of all blobs in the folder."""
        return {match[1] for name in self._files() if (match := _BLOB.fullmatch(name))}

    def sound(self) -> set[str]:
        """Read all files, and return the digests of the undamaged ones."""
        return {digest for digest in self.names() if self._whole(digest)}

    def strangers(self) -> set[str]:
        """Return the names of files that are not blobs, such as temporary files."""
        return {name for name in self._files() if not _BLOB.fullmatch(name)}

    def remove_all(self, digests: Iterable[str]) -> None:
        """Remove blobs by digest, here and on nodes; skip missing ones."""
        digests = list(digests)
        for digest in digests:
            self.remove(digest)
        if self.elsewhere is not None:
            self.elsewhere.remove(digests)

    def remove(self, digest: str) -> None:
        """Remove the blob with this digest, if it exists."""
        with ledger_errors(self.path(digest)):
            self.path(digest).unlink(missing_ok=True)

    def sweep(self) -> list[str]:
        """Remove the temporary files that a crash left, and return their names. No other process may be writing."""
        temporary = sorted(name for name in self.strangers() if name.startswith("."))
        with ledger_errors(self.folder):
            for name in temporary:
                (self.folder / name).unlink(missing_ok=True)
        return temporary

    def _files(self) -> list[str]:
        return os.listdir(self.folder) if self.folder.is_dir() else []


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(SYNCS, thread_name_prefix="fedloom-blobs")


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of the threads


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes, as hex. A pipe, which would block, counts as empty."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_all(paths: Iterable[Path]) -> None:
    for path in paths:
        sync(path)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk. On Windows, folders are skipped."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
