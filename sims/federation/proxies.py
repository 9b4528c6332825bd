"""Proxies that this machine's environment names: none is asked for what is on this machine."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAMES = ("http_proxy", "https_proxy", "all_proxy")


def named(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that name a proxy, and which."""
    return {name: text for name, text in sorted(environment.items()) if name.lower() in NAMES and text}


def usable(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, but for SOCKS proxies that Flower's programs cannot go by: they would not start at all."""
    if importlib.util.find_spec("socksio"):
        return dict(environment)
    useless = {name for name, text in named(environment).items() if text.lower().startswith("socks")}
    return {name: text for name, text in environment.items() if name not in useless}


def unproxied(environment: Mapping[str, str]) -> dict[str, str]:
    """What keeps loopback from proxies, where any is named."""
    if not named(environment):
        return {}
    before = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    kept = [name.strip() for name in before.split(",") if name.strip()]
    text = ",".join([*kept, *(name for name in LOOPBACK if name not in kept)])
    return {"no_proxy": text, "NO_PROXY": text}


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, but for proxies: of a program that speaks to this machine alone."""
    return {name: text for name, text in environment.items() if name.lower() not in NAMES}


@contextlib.contextmanager
def none_named() -> Iterator[None]:
    """Connections that are opened in here are to this machine: they take no proxy."""
    before = named(os.environ)
    for name in before:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(before)
