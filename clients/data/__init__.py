"""Domains of labelled images: where they come from, how they are split, changed, and divided among sites."""

from clients.data.domains import domain_names, where
from clients.data.images import Images, random_flip, to_float
from clients.data.sites import site_images, site_sizes, test_images, validation_images
from clients.data.variants import domain_specs, label, num_classes, outputs

__all__ = [
    "Images",
    "domain_names",
    "domain_specs",
    "label",
    "num_classes",
    "outputs",
    "random_flip",
    "site_images",
    "site_sizes",
    "test_images",
    "to_float",
    "validation_images",
    "where",
]
