"""Handle proxies in the environment, so that none of them is used within this machine."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAMES = ("http_proxy", "https_proxy", "all_proxy")


def named(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment's variables that set a proxy, in order of their names."""
    return {name: text for name, text in sorted(environment.items()) if name.lower() in NAMES and text}


def usable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, without SOCKS proxies if the package socksio is missing: Flower would not start."""
    if importlib.util.find_spec("socksio"):
        return dict(environment)
    useless = {name for name, text in named(environment).items() if text.lower().startswith("socks")}
    return {name: text for name, text in environment.items() if name not in useless}


def unproxied(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make connections within this machine avoid the proxies; {} without a proxy."""
    if not named(environment):
        return {}
    before = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    excluded = [name.strip() for name in before.split(",") if name.strip()]
    text = ",".join([*excluded, *(name for name in LOOPBACK if name not in excluded)])
    return {"no_proxy": text, "NO_PROXY": text}


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without proxies, for a program that connects to this machine only."""
    return {name: text for name, text in environment.items() if name.lower() not in NAMES}


@contextlib.contextmanager
def none_named() -> Iterator[None]:
    """Remove the proxies from this process's environment while connections to this machine are opened."""
    before = named(os.environ)
    for name in before:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)
