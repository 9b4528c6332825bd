"""Training, validation and test examples of a domain. They depend only on the seed and the domain's name."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from fedloom.clients.data import targets
from fedloom.clients.data.domains import Place
from fedloom.clients.data.schema import CLASS
from fedloom.clients.data.sources import OFFICIAL, Labels, Positions
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import generator
from fedloom.conf.schema import Config

TEST_SHARE = 0.2  # if the source has no test part


@dataclass(frozen=True)
class SplitRule:
    """What decides the split of a domain, besides the domain itself: keys of a run's configuration.

    Attributes:
        seed: `seed`.
        validation: `data.validation`.
        validation_limit: `data.validation_limit`.
    """

    seed: int
    validation: float
    validation_limit: int

    @classmethod
    def of(cls, config: Config) -> "SplitRule":
        """Return the rule of a configuration."""
        return cls(config.seed, config.data.validation, config.data.validation_limit)

    @classmethod
    def parsed(cls, text: str) -> "SplitRule | None":
        """Return the rule in JSON that `text` wrote; None for other texts."""
        try:
            rule = cls(**json.loads(text))
            whole = type(rule.seed) is type(rule.validation_limit) is int
            valid = 0 <= rule.seed < 2**63 and 0 <= rule.validation <= 0.5 and 1 <= rule.validation_limit < 2**63
        except (TypeError, ValueError, RecursionError):
            return None
        return rule if whole and valid else None

    def text(self) -> str:
        """Return the rule as JSON, for a file's metadata."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, eq=False)
class Selection:
    """Images of a part of a source, by position: `index`, int64 [n], ascending."""

    part: str
    index: Positions

    def __len__(self) -> int:
        return len(self.index)

    def at(self, positions: Positions) -> "Selection":
        """Return a smaller Selection: the images at `positions` within this one."""
        return Selection(self.part, np.sort(self.index[positions]))


@dataclass(frozen=True, eq=False)
class Split:
    """The training, validation and test examples of a domain: three disjoint selections."""

    train: Selection
    validation: Selection
    test: Selection


@lru_cache(maxsize=64)
def split(place: Place, seed: int, share: float, limit: int) -> Split:
    """Split a domain into training, validation and test examples.

    The test part is the source's own, or a stratified fifth of all images. The validation part is a stratified random
    `share` of the rest, at most `limit` images. It is the same for every variant of the domain, so no site trains on it.
    """
    train, test = _train_test(place, seed)
    count = min(limit, max(1, round(share * len(train)))) if share > 0 else 0
    held, rest = _draw(strata(place, train), count, generator(seed, place.name, "validation"))
    return Split(train.at(rest), train.at(held), test)


def labels(place: Place, selection: Selection) -> Labels:
    """Return the targets of the selected examples: int64 [n] classes, or as Schema says."""
    return _labels(place, selection.part)[selection.index]


def strata(place: Place, selection: Selection) -> Labels:
    """Return the strata of the selected examples, int64 [n]: their classes, or as targets.strata says."""
    return _strata(place, selection.part)[selection.index]


def of_classes(place: Place, selection: Selection, classes: tuple[int, ...]) -> Selection:
    """Return the selected images of these classes (empty: of all). Raises UserError for a class that the domain lacks."""
    if not classes:
        return selection
    if place.schema.task != CLASS:
        raise UserError(f"classes: {place.name} has no classes, but {place.schema.task} targets; remove classes")
    if max(classes) >= place.classes:
        raise UserError(f"classes: got {max(classes)}, but {place.name} has the classes 0 to {place.classes - 1}")
    return selection.at(np.flatnonzero(np.isin(labels(place, selection), classes)))


def at_most(place: Place, selection: Selection, limit: int, seed: int) -> Selection:
    """Return a stratified random subset of at most `limit` of the selected images (0: all)."""
    if limit == 0 or limit >= len(selection):
        return selection
    drawn, _ = _draw(strata(place, selection), limit, generator(seed, place.name, "limit", selection.part))
    return selection.at(drawn)


def has_test_part(place: Place) -> bool:
    """Return whether the source has a test part, which is the same for every seed."""
    return place.source.parts == OFFICIAL


def _train_test(place: Place, seed: int) -> tuple[Selection, Selection]:
    if has_test_part(place):
        train, test = (Selection(part, np.arange(len(_labels(place, part)))) for part in OFFICIAL)
        return train, test
    selection = Selection(place.source.parts[0], np.arange(len(_labels(place, place.source.parts[0]))))
    count = round(TEST_SHARE * len(selection))
    test, train = _draw(strata(place, selection), count, generator(seed, place.name, "test"))
    return selection.at(train), selection.at(test)


def _draw(labels: Labels, count: int, random: np.random.Generator) -> tuple[Positions, Positions]:
    """Draw `count` positions so that each class has its share, up to one image. Returns them and the others.

    Systematic sampling: the shuffled images are sorted by class and taken at even distances.
    """
    shuffled = random.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    taken = np.zeros(len(labels), bool)
    taken[(2 * np.arange(count) + 1) * len(labels) // (2 * max(count, 1))] = True
    return by_class[taken], by_class[~taken]


@lru_cache(maxsize=64)
def _labels(place: Place, part: str) -> Labels:
    values = place.labels(part)
    if place.schema.task != CLASS and len(values):
        return values
    if len(values) == 0 or not 0 <= values.min() <= values.max() < place.classes:
        origin = place.source.origin(place.folder)
        raise UserError(f"domain '{place.name}': {origin} has no labels, or labels outside 0 to {place.classes - 1}")
    return values


@lru_cache(maxsize=64)
def _strata(place: Place, part: str) -> Labels:
    return targets.strata(_labels(place, part), place.schema.task)
