"""Check that a user's images show anything. Images read wrongly are usually black, without any error."""

from collections import Counter
from functools import lru_cache

import numpy as np

from fedloom.clients.data.domains import Place
from fedloom.clients.data.form import IMAGE
from fedloom.clients.data.own import Own
from fedloom.clients.data.schema import WORD
from fedloom.conf.errors import UserError

SAMPLE = 64  # images to check
MIN_IMAGES = 5  # images; with fewer, the check is skipped
NEARLY_ALL = 0.9
NARROW = 0.25  # of the whole range


@lru_cache(maxsize=64)
def check_not_blank(place: Place, white: int = 0) -> str:
    """Check that a sample of a user's images is not blank. `white`: the level of 16 bits that is white; 0: WORD.

    Returns:
        A warning about single colours or a small part of 16 bits; "" if all is well, for shipped data sets, and for inputs
            that are not images.

    Raises:
        UserError: Nearly all images have the same single colour, or all use a small part of the range of values.
    """
    if not isinstance(place.source, Own) or place.schema.kind != IMAGE:
        return ""
    odd = [_check_part(place, part, white) for part in place.source.parts]
    return next(filter(None, odd), "")


def _check_part(place: Place, part: str, white: int) -> str:
    count = len(place.labels(part))
    if count < MIN_IMAGES:
        return ""
    sample = place.images(part, np.unique(np.linspace(0, count - 1, SAMPLE).astype(np.int64)))
    seen = [(image.min((0, 1)), image.max((0, 1))) for image in sample]  # lowest and highest level of each channel
    low, high = min(float(low.min()) for low, _ in seen), max(float(high.max()) for _, high in seen)
    flat = Counter(low.tobytes() for low, high in seen if (low == high).all())
    where, of = f"domain '{place.name}': {place.source.origin(place.folder)}", f"of {len(seen)} images checked"
    if (alike := max(flat.values(), default=0)) >= NEARLY_ALL * len(seen):
        raise UserError(f"{where}: {alike} {of} show only the same single colour (such as light ink on transparency, which "
                        "becomes white on white). Save them without transparency.")  # fmt: skip
    top = (white or WORD) if place.schema.levels == WORD else place.schema.levels
    if high - low < NARROW * top:
        few = f"{where}: all {of} use only the levels {low:g} to {high:g} of 0 to {top}"
        if place.schema.levels == WORD:
            return f"{few}; set data.white to the level that is white (such as 4095 for 12 bits)"
        raise UserError(f"{few}. Rescale their values to the whole range.")
    if flat.total() >= NEARLY_ALL * len(seen):
        return f"{where}: {flat.total()} {of} have a single colour each; check that this is intended"
    return ""
