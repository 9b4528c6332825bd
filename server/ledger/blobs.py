"""Content-addressed states on disk: a file's name is the sha256 of its bytes, so nothing is ever written over."""

import errno
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
from safetensors.torch import load, save

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

SYNCS = 8  # files that are made durable at the same time
_BLOB = re.compile(r"([0-9a-f]{64})\.safetensors")
_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "; make room and run again, what was committed is safe"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "; look at its permissions"),
}


class LedgerError(UserError):
    """A ledger that cannot be read or written, or an order that does not fit what it holds."""


class NodeLostError(LedgerError):
    """A node of the cluster that kept contributions is not there any more."""


UNREADABLE = "what it gave before cannot be read"  # of a site's reply: by its node, which is then to be asked what it has


class RemoteBlobStore(Protocol):
    """Contributions that the nodes of a cluster keep (federation.node_store). All but `look` raise NodeLostError."""

    def look(self) -> bool:
        """Whether any may be gone since the last look."""
        ...

    def doubt(self) -> None:
        """Look again the next time: something could not be read."""
        ...

    def names(self) -> set[str]:
        """The digests of all."""
        ...

    def holder(self, digest: str) -> str:
        """The node that has it; empty if none has."""
        ...

    def get(self, digest: str) -> bytes:
        """Its bytes."""
        ...

    def add_up(self, partials: Any) -> Any:
        """One partial sum for several (clients.protocol.partial_sums.PartialSum) that one node keeps."""
        ...

    def summed(self, row: Any, names: Any, given: Any, bits: int) -> Any:
        """As server.ledger.sums.added_up, over contributions that nodes keep."""
        ...

    def remove(self, digests: Collection[str]) -> None:
        """Let go of some, as far as nodes are there."""
        ...

    def end(self) -> None:
        """Let go of all."""
        ...


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a LedgerError that names the file."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "")
        raise LedgerError(f"{error.filename or path}: {error.strerror or error}{hint}") from None


@dataclass(frozen=True)
class Blobs:
    """The states in `folder`, each in a file <sha256>.safetensors that is there whole or not at all.

    Contents and names survive a loss of power once they are settled: together for a round, not one by one for its thousand
    files. One that was never settled may be torn then; nothing refers to it, and who puts it again writes it again.
    """

    folder: Path
    elsewhere: RemoteBlobStore | None = None

    def has(self, digest: str) -> bool:
        """Whether the blob is there, or a node has it."""
        return self.path(digest).is_file() or bool(self.holder(digest))

    def holder(self, digest: str) -> str:
        """The node that has the blob in this folder's place; empty: none."""
        return self.elsewhere.holder(digest) if self.elsewhere is not None else ""

    def bring_home(self, digests: Iterable[str]) -> int:
        """Write what nodes keep of these blobs into the folder, for good, and let the nodes' parts go; how many."""
        if self.elsewhere is None:
            return 0
        away = sorted(digest for digest in set(digests) if self.holder(digest) and not self.path(digest).is_file())
        for digest in away:
            with told(self.path(digest)):
                write_bytes(self.path(digest), self._content(digest), durable=False, private=True)
        self.settle(away)
        self.elsewhere.end()
        return len(away)

    def put(self, state: State) -> str:
        """Write a state, unless it is there; its digest. Raises LedgerError if the disk refuses it."""
        tensors = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
        content = save(tensors, metadata={"format": "pt"})
        digest = hashlib.sha256(content).hexdigest()
        path = self.path(digest)
        with told(path):
            if not self._whole(digest):
                write_bytes(path, content, durable=False, private=True)
        return digest

    def adopt(self, path: Path) -> str:
        """Move in a complete file of the same file system; its digest. Raises LedgerError if that is refused."""
        with told(path):
            digest = file_digest(path)
            target = self.path(digest)
            if not self._whole(digest):
                self.folder.mkdir(parents=True, exist_ok=True)
                os.rename(path, target)
            elif not target.samefile(path):
                path.unlink()
        return digest

    def _whole(self, digest: str) -> bool:
        """Whether the blob is there, and not torn."""
        path = self.path(digest)
        return path.is_file() and file_digest(path) == digest

    def settle(self, digests: Iterable[str]) -> None:
        """Make these blobs durable, before anything refers to them. Raises LedgerError naming one that is not there."""
        paths = [self.path(digest) for digest in digests if not self.holder(digest)]
        for path in paths:
            if not path.is_file():
                raise LedgerError(f"{path}: no such blob; put it before it is committed")
        if self.folder.is_dir():
            with told(self.folder), ThreadPoolExecutor(SYNCS) as threads:  # together: the disk's journal takes them as one
                list(threads.map(sync, paths))
                sync(self.folder)

    def get(self, digest: str) -> State:
        """A state, its bytes verified. Raises LedgerError naming a file that is missing or not what its name says."""
        try:
            return dict(sorted(load(self._content(digest)).items()))  # safetensors has no order of its own
        except SafetensorError as error:
            raise LedgerError(f"{self.path(digest)}: is no readable safetensors file ({error})") from None

    def _content(self, digest: str) -> bytes:
        path = self.path(digest)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            if self.elsewhere is None or not self.holder(digest):
                raise LedgerError(f"{path}: no such blob; put it back from a copy of the run, or if a node of a cluster has "
                                  "it (federation.node_store), resume the run there") from None  # fmt: skip
            content = self.elsewhere.get(digest)
        except OSError as error:
            raise LedgerError(f"{path}: cannot be read ({error.strerror or error})") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise LedgerError(f"{path}: is damaged, its sha256 is not its name; put it back from a copy of the run")
        return content

    def path(self, digest: str) -> Path:
        """Where the blob of that digest is, or would be."""
        return self.folder / f"{digest}.safetensors"

    def names(self) -> set[str]:
        """The digests that have a file."""
        return {match[1] for name in self._files() if (match := _BLOB.fullmatch(name))}

    def sound(self) -> set[str]:
        """The digests whose file is what its name says; all are read."""
        return {digest for digest in self.names() if self._whole(digest)}

    def strangers(self) -> set[str]:
        """The names of files that are no blobs, such as temporaries."""
        return {name for name in self._files() if not _BLOB.fullmatch(name)}

    def remove_all(self, digests: Iterable[str]) -> None:
        """Remove blobs, those that are there."""
        digests = list(digests)
        with ThreadPoolExecutor(SYNCS) as threads:
            list(threads.map(self.remove, digests))
        if self.elsewhere is not None:
            self.elsewhere.remove(digests)

    def remove(self, digest: str) -> None:
        """Remove a blob, if it is there."""
        with told(self.path(digest)):
            self.path(digest).unlink(missing_ok=True)

    def sweep(self) -> list[str]:
        """Remove the temporaries that a crash left behind; their names. Nobody may be writing meanwhile."""
        left = sorted(name for name in self.strangers() if name.startswith("."))
        with told(self.folder):
            for name in left:
                (self.folder / name).unlink(missing_ok=True)
        return left

    def _files(self) -> list[str]:
        return os.listdir(self.folder) if self.folder.is_dir() else []


def file_digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder (Windows cannot), durable."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
