"""Write CSV files in the run's folder: csv/PART/rounds.csv, csv/PART/sites.csv and csv/results.csv."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.conf.schema import Config
from fedloom.sims.tracking.base import TRACKERS, Line, Part, Tracker, Writer
from fedloom.sims.tracking.numbers import round_numbers, site_numbers
from fedloom.sims.tracking.results import Results

FOLDER = "csv"


@TRACKERS.register("csv")
@dataclass(frozen=True)
class CsvTracker(Tracker):
    """Tables of comma-separated values. This tracker needs no package."""

    def open(self, config: Config) -> Writer:
        return CsvWriter(config, self.sites)


class CsvWriter(Writer):
    """Writes all rounds again when a process starts, so no round appears twice or survives a rollback."""

    def begin(self, part: Part) -> Line:
        return CsvLine(self.folder / FOLDER / part.name, self.sites)

    def results(self, results: Results) -> None:
        rows = [{"name": name, "value": number} for name, number in results.numbers.items()]
        rows += [{"name": f"digest/{name}", "value": digest} for name, digest in results.digest.items()]
        _write(self.folder / FOLDER / "results.csv", ["name", "value"], rows)


class CsvLine(Line):
    """A row for each round in rounds.csv, and for each number of a site in sites.csv."""

    def __init__(self, folder: Path, sites: set[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rounds, self._sites, self._named = folder / "rounds.csv", folder / "sites.csv", sites
        self._columns = ["round"]
        _write(self._rounds, self._columns, [])
        _write(self._sites, ["round", "site", "name", "value"], [])

    def write(self, record: dict[str, Any]) -> None:
        row = {"round": record["round"], **round_numbers(record)}
        if new := [name for name in row if name not in self._columns]:
            with self._rounds.open(encoding="utf-8", newline="") as file:
                before = list(csv.DictReader(file))
            self._columns += new
            _write(self._rounds, self._columns, before)
        with self._rounds.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)
        with self._sites.open("a", encoding="utf-8", newline="") as file:
            for site, numbers in site_numbers(record, self._named).items():
                csv.writer(file).writerows([record["round"], site, name, number] for name, number in numbers.items())

    def close(self, status: str) -> None:
        """Do nothing: all rows are written."""


def _write(path: Path, columns: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns)
        table.writeheader()
        table.writerows(rows)
