"""What a reproduction measures: of a preset, into a folder, each result once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.sims.experiments.kept import kept


@dataclass(frozen=True)
class Study:
    """A preset's results in a folder. `only`: the names of what is asked for; none: all."""

    preset: str
    folder: Path
    quiet: bool = True
    only: Sequence[str] = ()

    def once(self, name: str, key: Any, make: Callable[[], Any], line: Callable[[Any], str]) -> Any:
        """What `make` gives, kept as results/NAME.json and taken from there if it was made before, of the same key.

        `line` is printed of a result that is new, unless the study is quiet.
        """

        def measured() -> Any:
            result = make()
            if not self.quiet:
                print(line(result), flush=True)
            return result

        return kept(self.folder / "results" / f"{name}.json", key, measured)
