"""Read metrics.jsonl, to which a run appends a line per round. What was read of a large file is not parsed again."""

import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedloom.conf.yaml_text import read_json
from fedloom.server.run_folder.layout import METRICS

MOST_REMEMBERED = 4  # files
LEAST_REMEMBERED = 1 << 18  # bytes of a file
LAST = 256  # bytes before the end of what was read, which are compared


class _Read(NamedTuple):
    """What was read of a metrics.jsonl: the file's state, the end of the last whole line, and the records."""

    inode: int
    changed: int
    end: int
    last: bytes
    records: dict[int, dict[str, Any]]

    def begins(self, content: BinaryIO, stat: os.stat_result) -> bool:
        """Return whether the file begins with what was read: it is the same file, unchanged or longer."""
        if stat.st_ino != self.inode or stat.st_size < self.end:
            return False
        content.seek(self.end - len(self.last))
        appended = content.read(len(self.last)) == self.last
        return appended and (stat.st_size > self.end or stat.st_mtime_ns == self.changed)


_NOTHING = _Read(0, 0, 0, b"", {})
_READ: dict[Path, _Read] = {}  # of the files that were read last: the desk reads a run again after each round


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Return the records in a run's metrics.jsonl by round, without a line that a crash tore; empty if it cannot be read."""
    file = (path / METRICS).absolute()
    try:
        if not file.is_file():  # such as a pipe, which would block
            return {}
        with file.open("rb") as content:
            stat, known = os.fstat(content.fileno()), _READ.pop(file, _NOTHING)
            if not known.begins(content, stat):
                known = _NOTHING
            content.seek(known.end)
            whole, newline, torn = content.read().rpartition(b"\n")
            end = content.tell() - len(torn)
    except OSError:
        return {}
    records = {**known.records, **_records(whole)}
    if stat.st_size > LEAST_REMEMBERED:
        last = (whole + newline)[-LAST:] or known.last
        _READ[file] = _Read(stat.st_ino, stat.st_mtime_ns, end, last, records)
        while len(_READ) > MOST_REMEMBERED:
            _READ.pop(next(iter(_READ)), None)
    return {round: dict(record) for round, record in {**records, **_records(torn)}.items()}


def _records(lines: bytes) -> dict[int, dict[str, Any]]:
    records: dict[int, dict[str, Any]] = {}
    for line in lines.decode("utf-8", errors="replace").splitlines():
        try:
            record = read_json(line)
            records[int(record["round"])] = record
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
    return records
