"""Read and write YAML with libyaml. It is ten times faster than PyYAML's own reader, which has better errors. Read JSON.

A text may be wrong or hostile, so its nodes are checked before they become values.
"""

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode
from yaml.resolver import Resolver

from fedloom.conf.machine import uncollected

Kept = Callable[[Node], Node]

MOST_DEPTH = 100  # of nested lists and sections
MOST_COPIES = 1_000_000  # entries that the aliases of a text may stand for
MOST_DIGITS = 300

HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
TAG = "tag:yaml.org,2002:"
TAKEN = {f"{TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
NOT_MEANT = {f"{TAG}timestamp", f"{TAG}value"}  # dates and `=` are texts here

NUMBERS = {
    f"{TAG}int": re.compile(r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$"),
    f"{TAG}float": re.compile(
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?"
        r"|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
}


class _Plain(Resolver):
    """Decides the type of a value without quotes. 007 and 1:30 are texts, 1e-1 is a number."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, NUMBERS.get(tag, form)) for tag, form in forms if tag not in NOT_MEANT]
        for first, forms in Resolver.yaml_implicit_resolvers.items()
    }


class _Reader(_Plain, yaml.SafeLoader):
    """PyYAML's reader."""


def _by_libyaml() -> Any:
    """Return libyaml's reader with PyYAML's composer: libyaml's own overflows the stack on deep nesting."""

    class Reader(_Plain, Composer, yaml.CSafeLoader):
        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            Composer.__init__(self)

    return Reader


_Fast: Any = _by_libyaml() if hasattr(yaml, "CSafeLoader") else _Reader


_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Writer(_Dumper):
    """Quotes texts that `read_yaml` or another reader would read as something else. Writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Writer.add_implicit_resolver(f"{TAG}float", NUMBERS[f"{TAG}float"], list("-+0123456789."))


def read_yaml(text: str, kept: Kept | None = None) -> Any:
    """Return the value of a YAML text. Raise yaml.YAMLError for a wrong text, repeated keys or endless aliases.

    `kept`: a function that changes the root node before it becomes a value, such as conf.text_keys.keep_texts.
    """
    with contextlib.suppress(yaml.YAMLError), uncollected():  # on an error, the slower reader reports its position
        return _read(text, _Fast, kept)
    return _read(text, _Reader, kept)


def read_json(text: str) -> Any:
    """Return the value of a JSON text, with '?' for half a surrogate pair, which no UTF-8 text can hold.

    Raises ValueError or RecursionError for a wrong text.
    """
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:  # perhaps a half
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def write_yaml(tree: Any) -> str:
    """Return plain values as YAML, with keys in their order."""
    with uncollected():
        return yaml.dump(tree, Dumper=_Writer, sort_keys=False, allow_unicode=True)


def _read(text: str, kind: Any, kept: Kept | None) -> Any:
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _Check(MOST_COPIES + len(text)).measure(node, "", 0)
        return loader.construct_document(kept(node) if kept else node)
    except RecursionError:
        raise yaml.YAMLError(f"lists and sections are nested more than {MOST_DEPTH} deep") from None
    finally:
        loader.dispose()


class _Check:
    """Refuses nodes with repeated or invalid keys, unknown types of values, or aliases without end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: dict[int, tuple[int, int] | None] = {}  # by the node's identity; None while in progress

    def measure(self, node: Node, key: str, depth: int) -> tuple[int, int]:
        """Return the number of entries of a node with all aliases written out, and its height. `key`: the key above it."""
        if node.tag not in TAKEN:
            raise _wrong(node, key, f"is !!{node.tag.removeprefix(TAG)}, takes texts, numbers, lists and sections")
        if isinstance(node, ScalarNode):
            if HALF.search(node.value):
                raise _wrong(node, key, "has half a surrogate pair, which is not a character; remove it")
            if node.tag == f"{TAG}int" and len(node.value) > MOST_DIGITS:
                raise _wrong(node, key, f"is a number of {len(node.value)} digits, takes at most {MOST_DIGITS}")
            return 1 + len(node.value) // 100, 1
        if id(node) not in self._known:
            self._known[id(node)] = None
            self._known[id(node)] = self._inside(node, key, depth)
        measured = self._known[id(node)]
        if measured is None:
            raise _wrong(node, key, "refers to itself")
        if depth + measured[1] > MOST_DEPTH:
            raise _wrong(node, key, f"has lists and sections nested more than {MOST_DEPTH} deep")
        if measured[0] > self.limit:
            raise _wrong(node, key, f"has aliases that stand for more than {MOST_COPIES} entries")
        return measured

    def _inside(self, node: Node, key: str, depth: int) -> tuple[int, int]:
        children = _section(node) if isinstance(node, MappingNode) else [(key, child) for child in node.value]
        if depth > MOST_DEPTH:
            raise _wrong(node, key, f"has lists and sections nested more than {MOST_DEPTH} deep")
        size, height = 1, 0
        for name, child in children:
            entries, high = self.measure(child, name, depth + 1)
            size, height = size + entries, max(height, high)
        return size, height + 1


def _section(node: MappingNode) -> list[tuple[str, Node]]:
    """Return the values of a section, each with its key."""
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, ScalarNode):
            raise ConstructorError(None, None, "a list or section is not a valid key", key.start_mark)
        if key.tag == f"{TAG}null":
            raise _wrong(key, "", f"'{key.value}' is not a valid key; put it in quotes if it is a name")
        if (key.tag, key.value) in seen:
            raise _wrong(key, "", f"the key '{key.value}' appears twice")
        if HALF.search(key.value):
            raise _wrong(key, "", "a key has half a surrogate pair, which is not a character; remove it")
        seen.add((key.tag, key.value))
    return [(key.value, value) for key, value in node.value]


def _wrong(node: Node, key: str, message: str) -> ConstructorError:
    return ConstructorError(None, None, f"'{key}' {message}" if key else message, node.start_mark)
