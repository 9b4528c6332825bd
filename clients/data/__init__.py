"""Domains of labelled images: their sources, splits and variants, and their division among sites."""

from fedloom.clients.data.arrays import Labelled
from fedloom.clients.data.domains import domain_names, where
from fedloom.clients.data.examples import Examples, random_flip, to_float
from fedloom.clients.data.form import Form
from fedloom.clients.data.forms import input_form, task_of
from fedloom.clients.data.found import absolute
from fedloom.clients.data.sites import (
    class_counts,
    own_examples,
    remarks,
    site_examples,
    site_size,
    site_sizes,
    test_images,
    validation_images,
    value_of,
)
from fedloom.clients.data.variants import (
    class_count,
    class_meanings,
    class_names,
    column_names,
    differing,
    domain_specs,
    label,
    num_classes,
    numbers_named,
    outputs,
    variant,
)

__all__ = [
    "Examples",
    "Form",
    "Labelled",
    "absolute",
    "class_count",
    "class_counts",
    "class_meanings",
    "class_names",
    "column_names",
    "differing",
    "domain_names",
    "domain_specs",
    "input_form",
    "label",
    "num_classes",
    "numbers_named",
    "outputs",
    "own_examples",
    "random_flip",
    "remarks",
    "site_examples",
    "site_size",
    "site_sizes",
    "task_of",
    "test_images",
    "to_float",
    "validation_images",
    "value_of",
    "variant",
    "where",
]
