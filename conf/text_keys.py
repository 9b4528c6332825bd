"""Read values of text keys as written: there, 007, on, 1e5 and 2020-01-01 are texts."""

import dataclasses
from typing import Any, get_args, get_origin

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fedloom.conf.shorthand import fields_of, inner_of, is_named

TAG = "tag:yaml.org,2002:"
NULL, MERGE, TEXT = f"{TAG}null", f"{TAG}merge", f"{TAG}str"
HOME = "~"  # the home folder in a path; elsewhere it means null
PRESET, PRESETS = "preset", "presets"  # keys of an experiment's file


def keep_texts(schema: type, node: Node) -> Node:
    """Return the YAML node of a dataclass's section, with scalars of text fields marked as texts. null stays null."""
    if isinstance(node, MappingNode):
        node.value = [(_key(key), _of_key(schema, key, value)) for key, value in node.value]
    return node


def keep_texts_at(schema: type, key: str, node: Node) -> Node:
    """Return the YAML node of the value of one dotted key, such as sites.0.name, changed as by `keep_texts`."""
    first, _, rest = key.partition(".")
    if first == PRESET and not rest:
        return _text(node)
    field = fields_of(schema).get(first)
    if field is None:
        return node
    if rest and (inner := inner_of(field)):
        index, _, deeper = rest.partition(".")
        if not index.isdecimal():
            return keep_texts_at(inner, rest, node)
        return keep_texts_at(inner, deeper, node) if deeper else keep_texts(inner, node)
    if rest:
        is_text = (rest == "name" and is_named(field)) or _takes_texts(field)
        return _text(node) if is_text else node
    return _of_field(field, node)


def values_kept_at(schema: type, key: str, node: Node) -> Node:
    """Return a YAML list of values for one dotted key, each changed by `keep_texts_at`. It may be inside a list."""
    if isinstance(node, SequenceNode):
        node.value = [keep_texts_at(schema, key, value) for value in node.value]
        if len(node.value) == 1 and isinstance(value := node.value[0], SequenceNode):
            value.value = [keep_texts_at(schema, key, inner) for inner in value.value]
    return node


def _of_key(schema: type, key: Node, value: Node) -> Node:
    if key.tag == MERGE:
        return _sections(value, schema)
    if key.value == PRESETS and isinstance(value, MappingNode) and PRESETS not in fields_of(schema):
        value.value = [(name, keep_texts(schema, preset)) for name, preset in value.value]
        return value
    return keep_texts_at(schema, key.value, value) if isinstance(key, ScalarNode) else value


def _of_field(field: dataclasses.Field[Any], node: Node) -> Node:
    if field.metadata.get("path") and isinstance(node, ScalarNode) and node.value == HOME:
        return ScalarNode(TEXT, HOME, node.start_mark, node.end_mark)
    if _takes_texts(field):
        return _text(node, within=get_origin(field.type) is dict)
    if inner := inner_of(field):
        return _sections(node, inner)
    if is_named(field):
        return _with_name(node)
    return node


def _sections(node: Node, schema: type) -> Node:
    """Return a section, or a list of sections, of a dataclass with texts."""
    if isinstance(node, SequenceNode):
        node.value = [keep_texts(schema, entry) for entry in node.value]
        return node
    return keep_texts(schema, node)


def _with_name(node: Node) -> Node:
    """Return a section of options, or a list of them, with `name` as a text."""
    if isinstance(node, SequenceNode):
        node.value = [_with_name(entry) for entry in node.value]
    elif isinstance(node, MappingNode):
        node.value = [(key, _text(value) if key.value == "name" else value) for key, value in node.value]
    return node


def _takes_texts(field: dataclasses.Field[Any]) -> bool:
    """Return whether the field is a text, a list of texts or a section of texts."""
    return field.type is str or (get_origin(field.type) in (list, dict) and get_args(field.type)[-1] is str)


def _key(node: Node) -> Node:
    return _scalar(node) if node.tag != MERGE else node


def _text(node: Node, within: bool = False) -> Node:
    """Return a node as a text or a list of texts; with `within`, also as a section of texts."""
    if isinstance(node, ScalarNode):
        return _scalar(node)
    if isinstance(node, SequenceNode):
        node.value = [_text(entry) for entry in node.value]
    elif isinstance(node, MappingNode) and within:
        node.value = [(_key(key), _text(value)) for key, value in node.value]
    return node


def _scalar(node: Node) -> Node:
    if not isinstance(node, ScalarNode) or node.tag in (NULL, TEXT):
        return node
    return ScalarNode(TEXT, node.value, node.start_mark, node.end_mark, node.style)
