"""The form of a run's examples: what its networks take and return."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedloom.clients.data.domains import DOMAINS, Place, find, locate
from fedloom.clients.data.form import IMAGE, KINDS, TOKENS, Form
from fedloom.clients.data.found import asking
from fedloom.clients.data.schema import IMAGES, NEXT, TASKS, Schema, categories_of, without_of
from fedloom.clients.data.variants import domain_specs
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.schema import Config, DataConfig
from fedloom.conf.sites import SiteConfig

SMALLEST, LARGEST = 4, 4096  # pixels of a side
KEYS = ("kind", "task", "shape", "vocabulary")


def image_size(data: DataConfig) -> tuple[int, int] | None:
    """Return data.size as height and width; None: images stay as they are. Raises UserError for other values."""
    size = data.size
    if size == 0 and not isinstance(size, bool):
        return None
    sides = [size, size] if isinstance(size, int) else size
    fits = isinstance(sides, list | tuple) and len(sides) == 2 and not isinstance(size, bool)
    if not fits or not all(isinstance(side, int) and SMALLEST <= side <= LARGEST for side in sides):
        raise UserError(
            f"data.size: got {size!r}, takes 0, or a whole number or [height, width] from {SMALLEST} to {LARGEST}"
        )
    return int(sides[0]), int(sides[1])


def schema_of(config: Config, spec: SiteConfig) -> Schema:
    """Return the schema of a site's domain: data.form, or else the domain's own. Raises UserError for a wrong data.form."""
    stated = config.data.form
    if not stated:
        try:
            return find(spec.domain).schema
        except UserError:
            if config.data.heads == "shared" and config.data.classes:
                return IMAGES  # a domain that only its site has
            raise
    if odd := [key for key in stated if key not in KEYS]:
        raise UserError(f"data.form: {unknown('key', odd[0], KEYS)}")
    for key, known in (("kind", KINDS), ("task", TASKS)):
        if stated.get(key, known[0]) not in known:
            raise UserError(f"data.form.{key}: {unknown('value', stated[key], known)}")
    try:
        shape, vocabulary = tuple(map(int, stated.get("shape", ()))), int(stated.get("vocabulary", 0))
    except (TypeError, ValueError):
        raise UserError("data.form: shape takes a list of whole numbers, vocabulary a whole number") from None
    return Schema(stated.get("kind", KINDS[0]), stated.get("task", TASKS[0]), shape, vocabulary=vocabulary)


def with_form(config: Config, index: int, own: bool) -> Config:
    """Return the configuration as a site of a real federation takes it: with data.form instead of looks at domains.

    A server must not make a site read a path or import a module. Without data.form, the examples are those of the domain in
    the site's entry if it is shipped, or if the site reads it; with data of its own, they are labelled images.

    Args:
        config: The server's configuration, which the site's policy allows.
        index: The site's place in the roster.
        own: Whether the site has data of its own.
    """
    domain = config.roster[index].spec.domain
    if config.data.form or all(name in DOMAINS for name in config.domains):
        return config
    schema = IMAGES if own and domain not in DOMAINS else find(domain).schema
    form = {key: getattr(schema, key) for key in KEYS}
    return replace(config, data=replace(config.data, form={**form, "shape": list(schema.shape)}))


def task_of(config: Config) -> str:
    """Return the task of a run's targets, one of schema.TASKS."""
    return schema_of(config, next(iter(domain_specs(config).values()))).task


def input_form(config: Config, spec: SiteConfig, outputs: int) -> Form:
    """Return the form of a site's examples, for a network with `outputs` outputs. Reads one image if data.size is 0."""
    schema = schema_of(config, spec)
    if schema.kind != IMAGE:
        vocabulary = max(schema_of(config, other).vocabulary for other in domain_specs(config).values())
        return Form(schema.kind, schema.shape, outputs, vocabulary if schema.kind == TOKENS else 0, schema.task == NEXT)
    size = image_size(config.data)
    if config.data.form:
        shape = (*schema.shape, 1)[:3] if len(schema.shape) > 1 else (0, 0, 1)
        if size is None and len(schema.shape) < 2:
            raise UserError("data.size: 0 needs data.form.shape, [height, width, channels], on a machine without data")
    elif size is not None and (config.data.grey or spec.domain in DOMAINS):
        shape = (*size, 1)  # without a look at the images
    else:
        shape = _image_shape(locate(spec.domain, config.data))
    channels = 1 if config.data.grey else 3 if shape[2] == 1 else shape[2]
    return Form(IMAGE, (channels, *(size or shape[:2])), outputs)


@lru_cache(maxsize=64)
def _image_shape(place: Place) -> tuple[int, int, int]:
    """Return height, width and channels of a domain's first image."""
    part = place.source.parts[0]
    image = next(iter(place.images(part, np.zeros(1, np.int64))))
    return image.shape[0], image.shape[1], image.shape[2] if image.ndim == 3 else 1


def check_forms(config: Config) -> None:
    """Raise UserError if the domains' examples differ in form, or if an option does not fit them."""
    specs = domain_specs(config)
    (first, spec), *others = specs.items()
    schema = schema_of(config, spec)
    for name, other in others:
        if difference := schema.difference(schema_of(config, other)):
            tables = [schema_of(config, each).columns for each in specs.values()]
            listed, without = categories_of(tables), without_of(tables) if all(tables) else ""
            hint = f" Write {asking(spec.domain, listed[1:])} in the domain of each site." if listed else ""
            hint += (
                f" Write {asking(spec.domain, without[1:])} in the domain of each site with such a column."
                if without
                else ""
            )
            raise UserError(f"sites: {first} and {name} have different examples, {difference}. All sites of a run take the "
                            f"same inputs and targets.{hint}")  # fmt: skip
    if schema.kind != IMAGE:
        for name, site in specs.items():
            if odd := [key for key in ("rotation", "invert", "flip") if getattr(site, key)]:
                raise UserError(f"{name}: {odd[0]} is for images, but these are {schema.kind}; remove {odd[0]}")
    elif config.data.grey:
        for site in specs.values():
            if site.domain in DOMAINS:
                continue
            if (channels := _image_shape(locate(site.domain, config.data))[2]) not in (1, 3):
                raise UserError(f"data.grey: images of {site.domain} have {channels} channels; set data.grey=false")
