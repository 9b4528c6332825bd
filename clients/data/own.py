"""Users' own domains by configuration: folders of images, npz files, data sets on disk, functions."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedloom.clients.data import listing
from fedloom.clients.data.arrays import Labelled, check_image
from fedloom.clients.data.contents import of_arrays
from fedloom.clients.data.found import (
    KINDS,
    Contents,
    Encoding,
    fitting,
    function_of,
    has_path,
    legible,
    origin,
    path_of,
    query_of,
    short,
    wrong,
)
from fedloom.clients.data.sources import OFFICIAL, WHOLE, Labels, Pixels, Positions
from fedloom.conf.errors import UserError, plain
from fedloom.conf.plugins import call, outside, parameters

MOST_HELD = 16  # cached domains
MEMBERS = {  # names of arrays in npz files, lower-case
    "train": (("x_train", "y_train"), ("train_images", "train_labels")),
    "test": (("x_test", "y_test"), ("test_images", "test_labels")),
    "all": (("x", "y"), ("images", "labels")),
}
ENDINGS = [("npz:{}", ".npz"), *(("table:{}?target=COLUMN", ending) for ending in (".csv", ".csv.gz", ".tsv", ".parquet"))]


@dataclass(frozen=True)
class Own:
    """A source that is named by the domain itself (`images:PATH`, ...), independent of the data folder.

    Implements clients.data.sources.Source.
    """

    domain: str
    parts: ClassVar[tuple[str, ...]] = WHOLE

    def origin(self, folder: Path) -> str:
        return origin(self.domain)

    def found(self, folder: Path) -> bool:
        return True

    def state(self, folder: Path) -> str:
        return state_of(self.domain)

    def labels(self, folder: Path, part: str) -> Labels:
        return contents(self.domain).labels[part]

    def images(self, folder: Path, part: str, index: Positions) -> Pixels | Iterable[Pixels]:
        return contents(self.domain).images[part](index)

    def columns(self, part: str) -> Mapping[str, Any]:
        """Return a table's columns by name, each [n]; empty for other domains."""
        return contents(self.domain).groups.get(part, {})


@dataclass(frozen=True)
class OwnSplit(Own):
    """A user's source that has its own test examples: its parts are train and test."""

    parts: ClassVar[tuple[str, ...]] = OFFICIAL


def state_of(domain: str) -> str:
    """Return a digest of a domain's files, or the id of the current run for a domain that a user's function returns."""
    return listing.state(path_of(domain), _counts(domain)) if has_path(domain) else listing.run_now()


def digests(domains: Iterable[str]) -> dict[str, str]:
    """Return a digest of the files of each domain with a path, by its path."""
    return {origin(name): listing.content(path_of(name), _counts(name)) for name in domains if has_path(name)}


def _counts(domain: str) -> listing.Counts:
    """Return which files of a folder the domain is read from, by their names."""
    if domain.startswith("images:"):
        from fedloom.clients.data.folders import SUFFIXES

        return lambda name: Path(name).suffix.lower() in SUFFIXES
    return lambda name: not name.startswith("cache-")  # files that Hugging Face's library adds


def contents(domain: str) -> Contents:
    """Return the contents of a user's domain, cached while its files are unchanged.

    Raises UserError for a domain that is missing, damaged or unusable, or whose classes changed during a run.
    """
    state, run, before = state_of(domain), listing.run_now(), _CONTENTS.get(domain)
    if before and before[0] == state:
        return before[2]
    content = _read(domain)
    if has_path(domain) and listing.fresh(path_of(domain), _counts(domain)) != state:
        raise wrong(domain, "changed while it was read. Once it is complete, resume the run or start again.")
    if before and run and before[1] == run and _facts(before[2]) != _facts(content):
        raise wrong(domain, "has other classes than when the run began. Restore them, or start a new run.")
    _CONTENTS[domain] = state, run, content
    while len(_CONTENTS) > MOST_HELD:
        _CONTENTS.popitem(last=False)
    return content


def _facts(content: Contents) -> tuple[Any, ...]:
    return content.classes, content.names, content.schema


_CONTENTS: OrderedDict[str, tuple[str, str, Contents]] = (
    OrderedDict()
)  # by domain: its state, the run that read it, its contents


def _read(domain: str) -> Contents:
    if not has_path(domain):
        return _function(domain)
    path = path_of(domain)
    if not path.exists():
        raise UserError(f"domain '{short(domain)}': {path} does not exist. Correct the path in '{domain}'.")
    with legible(domain):
        return READERS[domain.partition(":")[0]](path, domain)


def check_files(domain: str) -> None:
    """Raise UserError for the first image file of a user's domain that is damaged or too large to be opened."""
    if has_path(domain):
        _check_files(domain, state_of(domain))


@lru_cache(maxsize=16)
def _check_files(domain: str, state: str) -> None:
    from PIL import Image

    from fedloom.clients.data.tiff import read_channels

    for file in contents(domain).files:
        with legible(domain, str(file)):
            if read_channels(file) is not None:
                continue
            with Image.open(file) as image:
                check_image(image)


def left_out(domain: str) -> str:
    """Return a line about what is not read at a domain's path; empty if everything is read."""
    descriptions = contents(domain).left_out if has_path(domain) else ()
    return f"domain '{short(domain)}': left out: {', '.join(descriptions)}" if descriptions else ""


def encoding_of(domain: str) -> Encoding | None:
    """Return how the rows of a domain's table become inputs; None for a domain of another kind."""
    return contents(domain).encoding if domain.startswith("table:") else None


def notes(domain: str) -> list[str]:
    """Return warnings about the contents of a user's domain."""
    return [f"domain '{short(domain)}': {line}" for line in contents(domain).notes]


def _npz(path: Path, domain: str) -> Contents:
    """Read an npz file of images and labels, of train and test or of all."""
    if not path.is_file():
        raise wrong(domain, "is not a regular file. Name an npz file of images and labels (numpy.savez).")
    try:
        archive = np.load(path, allow_pickle=False)
    except (ValueError, EOFError):
        raise wrong(domain, "is not an npz file; takes one of images and labels (numpy.savez)") from None
    if isinstance(archive, np.ndarray):
        raise wrong(domain, "is a single array; takes an npz file of images and labels (numpy.savez)")
    with archive:
        members = {name.lower(): name for name in archive.files}
        chosen = {part: _pair(members, part, domain) for part in MEMBERS}
        parts = OFFICIAL if chosen["train"] and chosen["test"] else WHOLE
        if not all(chosen[part] for part in parts):
            raise wrong(domain, f"has {', '.join(archive.files)}; takes x and y, or x_train, y_train, x_test and y_test")
        arrays = {part: tuple(_member(archive, members[name], domain) for name in chosen[part]) for part in parts}
    read = {members[name] for part in parts for name in chosen[part]}
    left = tuple(f"the array '{plain(name)}'" for name in archive.files if name not in read)
    return of_arrays({part: _asked(Labelled(*pair), domain) for part, pair in arrays.items()}, domain, left)


def _pair(members: Iterable[str], part: str, domain: str) -> tuple[str, ...]:
    """Return the names of a part's images and labels; empty if the part is missing."""
    pairs = [pair for pair in MEMBERS[part] if set(pair) <= set(members)]
    if len(pairs) > 1:
        raise wrong(
            domain, f"has {' and '.join(', '.join(pair) for pair in pairs)}. Remove all but one pair of images and labels."
        )
    return pairs[0] if pairs else ()


def _member(archive: Any, name: str, domain: str) -> Any:
    try:
        return archive[name]
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        fault = f"has Python objects in '{name}', which are not read. Save numbers or texts, such as {name}.astype(str)."
        raise wrong(domain, fault) from None


def _function(domain: str) -> Contents:
    """Call a user's function or class. One that takes `split` or `train` is called twice, for train and for test."""
    function = lookup(domain)
    if not callable(function):
        raise UserError(
            f"domain '{domain}': has the type {type(function).__name__}; it must be a function that returns images"
        )
    taken = {parameter.name for parameter in parameters(function)[0]}
    if "split" in taken:
        made: Any = {part: call(function, {}, {"split": part}, domain, "domain") for part in OFFICIAL}
    elif "train" in taken:
        made = {part: call(function, {}, {"train": part == "train"}, domain, "domain") for part in OFFICIAL}
    else:
        made = call(function, {}, {}, domain, "domain")
    parts = made if isinstance(made, Mapping) else {WHOLE[0]: made}
    if set(parts) not in ({*OFFICIAL}, {*WHOLE}):
        raise wrong(domain, f"returned {', '.join(map(str, parts)) or 'nothing'}; takes train and test")
    with legible(domain), fitting(domain):
        return of_arrays({part: _asked(Labelled.of(made), domain) for part, made in parts.items()}, domain)


def _asked(examples: Labelled, domain: str) -> Labelled:
    """Return examples with the kind of inputs and targets in the domain's query, if it has them."""
    query = query_of(domain)
    return replace(examples, kind=query.get("inputs", examples.kind), task=query.get("task", examples.task))


def lookup(domain: str, known: Iterable[str] = ()) -> Any:
    """Return the object that a domain names in a user's package. Raises UserError for an unknown name."""
    name = function_of(domain)
    if meant := next((kind for kind, ending in ENDINGS if name.lower().endswith(ending)), ""):
        raise UserError(f"unknown domain '{domain}'; write {meant.format(name)}")
    names = [*known, *(f"{kind}:PATH" for kind in READERS), "module:function"]
    return outside("domain", domain if name in known else name, names, "domain")


def _folder(path: Path, domain: str) -> Contents:
    from fedloom.clients.data.folders import read_folder

    return read_folder(path, domain)


def _dataset(path: Path, domain: str) -> Contents:
    from fedloom.clients.data.hugging_face import read_dataset

    return read_dataset(path, domain)


def _table(path: Path, domain: str) -> Contents:
    from fedloom.clients.data.tables import read_table

    return read_table(path, domain)


READERS: dict[str, Callable[[Path, str], Contents]] = dict(zip(KINDS, (_folder, _npz, _dataset, _table), strict=True))
