"""Build a frozen dataclass from a mapping. OmegaConf checks types; the fields' metadata has ranges and choices."""

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedloom.conf.errors import UserError, listed, nearest
from fedloom.conf.package import NAME
from fedloom.conf.plugins import error_summary
from fedloom.conf.shorthand import expand_shorthand, fields_of, is_listed
from fedloom.conf.values import KINDS, check_value, check_values, join, over_default, shortened, takes
from fedloom.conf.yaml_text import HALF

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    named: bool = False,
    entries: type | None = None,
    path: bool = False,
    listed: bool = True,
    takes: str = "",
    implies: str = "",
) -> Any:
    """Declare a dataclass field with its default, meaning and range.

    Args:
        low: The smallest value; of a list, of each entry.
        high: The largest value, in the same way.
        named: The field is a section with a name, and the name alone may replace it.
        entries: The dataclass of the entries, if the field may be a list.
        path: The field is a path or a list of paths; `~` is the home folder of the user who reads it.
        listed: Errors and tables of options name the field.
        takes: Which values it takes, as words, if its type does not say so.
        implies: The name of a section that sets this option and no name.
    """
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "named": named, "path": path, "listed": listed}
    metadata |= {key: item for key, item in (("entries", entries), ("takes", takes), ("implies", implies)) if item}
    if isinstance(default, list | dict) or callable(default):
        factory = default if callable(default) else lambda: type(default)(default)
        hashed = None if callable(default) else False  # lists and dictionaries have no hash
        return dataclasses.field(default_factory=factory, hash=hashed, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


MISSPELT = 0.72  # keys that are this similar are misspellings, and short ones with one wrong letter


class UnknownKeyError(UserError):
    """The error for a key that its section lacks. It suggests `near`, by default the most similar known key."""

    def __init__(self, key: str, known: Sequence[str], near: str = "") -> None:
        self.key, self.known = key, known
        end = key.rpartition(".")[2]
        cutoff = max(0.5, min(MISSPELT, 1 - 1 / max(len(end), 1) - 1e-9))
        near_end = nearest(end, [each.rpartition(".")[2] for each in known], cutoff)
        self.near = near or nearest(key, [each for each in known if each.rpartition(".")[2] == near_end], 0.0)
        hint = f"; did you mean '{self.near}'?" if self.near else ""
        super().__init__(f"unknown key '{key}'{hint} (known: {listed(key, known)})")

    def suggesting(self, near: str) -> "UnknownKeyError":
        """Return a copy of the error that suggests the key `near`."""
        return UnknownKeyError(self.key, self.known, near)


def build(schema: type[T], given: Mapping[str, Any], where: str = "") -> T:
    """Build an instance of the dataclass `schema` from a mapping.

    `where` is the mapping's dotted key. The mapping may come from another machine, so nothing in it is interpolated.
    Raises UserError with the full key, its value, and the accepted values.
    """
    given = expand_shorthand(schema, given)
    _check_keys(schema, given, where)
    _check_literal(given, where)
    _check_texts(schema, given, where)
    result = _instance(schema, given, where)
    check_values(result, where)
    return result


def _instance(schema: type[T], given: Mapping[str, Any], where: str) -> T:
    """Return an instance of `schema`. OmegaConf converts values that are not of their field's type, and checks them."""
    fields = fields_of(schema)
    for key, field in fields.items():
        if key not in given and field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{join(where, key)}: is missing; it takes {takes(field)}")
    given = {key: over_default(fields[key], item) for key, item in given.items()}
    values = {
        key: _instance(section, item, join(where, key))
        for key, item in given.items()
        if (section := _section(fields[key], item))
    }
    try:
        if not schema.__module__.startswith(f"{NAME}."):
            OmegaConf.structured(schema)  # raises an error for a field whose type is not supported
        kinds = _kinds(schema)
        values |= {
            key: copy.deepcopy(item) for key, item in given.items() if key not in values and _of_kind(kinds[key], item)
        }
        return schema(**values, **_converted(schema, {key: item for key, item in given.items() if key not in values}))
    except (OmegaConfBaseException, TypeError) as error:
        raise _misfit(schema, given, where) or UserError(_in_one_line(error, where)) from None
    except UserError:
        raise
    except Exception as error:  # from the class's own checks
        raise UserError(f"{where}: {error_summary(error)}") from error


def _converted(schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of fields of `schema`, converted to the fields' types."""
    if not given:
        return {}
    kinds = _kinds(schema)
    if wrong := [name for name, item in given.items() if not _is_truth(kinds[name], item)]:
        raise TypeError(f"{wrong[0]}: takes true or false")
    return vars(OmegaConf.to_object(OmegaConf.merge(_typed(schema, tuple(given)), OmegaConf.create(dict(given)))))


def value_of(schema: type, name: str, item: Any) -> Any:
    """Return a value as `build` would store it in the field `name`: '1' and 1 become 1.0 in a field of type float.

    Raises UserError for a value that the field's type does not take. Ranges and choices are not checked.
    """
    given = expand_shorthand(schema, {name: item})
    _check_literal(given, name)
    if _of_kind(_kinds(schema)[name], given[name]):
        return given[name]
    try:
        return _converted(schema, given)[name]
    except (OmegaConfBaseException, TypeError) as error:
        raise _misfit(schema, given, "") or UserError(_in_one_line(error, name)) from None


def at_home(instance: T) -> T:
    """Return a dataclass instance with `~` and `~name` at the start of its path fields replaced by the home folder."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        if field.metadata.get("path"):
            changed[field.name] = [*map(os.path.expanduser, value)] if isinstance(value, list) else os.path.expanduser(value)
        elif dataclasses.is_dataclass(value):
            changed[field.name] = at_home(value)
    return dataclasses.replace(instance, **changed)  # type: ignore[type-var]


def checked(given: Any, where: str) -> Any:
    """Return a value unchanged. Raise UserError if it contains a text that OmegaConf would interpolate (${...}, ???)."""
    _check_literal(given, where)
    return given


def build_many(schema: type[T], given: Mapping[str, Any], where: str) -> T:
    """Build an instance as `build` does, but faster for thousands of sections that differ only in plain values."""
    given = expand_shorthand(schema, given)
    _check_keys(schema, given, where)
    _check_literal(given, where)
    kinds = _kinds(schema)
    plain = {key: item for key, item in given.items() if kinds[key] in PLAIN and type(item) is kinds[key]}
    rest = json.dumps({key: item for key, item in given.items() if key not in plain}, sort_keys=True, default=repr)
    if (schema, rest) not in _BUILT:
        if len(_BUILT) >= MOST_BUILT:
            _BUILT.clear()
        _BUILT[schema, rest] = build(schema, {key: item for key, item in given.items() if key not in plain}, where)
    fields = fields_of(schema)
    for key, item in plain.items():  # the rest was checked when it was built
        check_value(fields[key], item, join(where, key))
    return dataclasses.replace(_BUILT[schema, rest], **plain)


PLAIN = (str, int, float, bool)  # types whose values need no conversion
MOST_BUILT = 1000
_BUILT: dict[tuple[type, str], Any] = {}


@functools.cache
def _kinds(schema: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    return {name: field.type for name, field in fields_of(schema).items()}


def _of_kind(kind: Any, item: Any) -> bool:
    """Return whether a value is of a field's type, so that OmegaConf would not change it. False if that is not certain."""
    if kind is Any:
        return item is None or type(item) in PLAIN or _of_kind(list[Any], item) or _of_kind(dict[str, Any], item)
    if kind == dict[str, Any] and type(item) is dict:
        return all(type(key) is str and _of_kind(Any, value) for key, value in item.items())
    if kind == list[Any] and type(item) is list:
        return all(_of_kind(Any, value) for value in item)
    return (kind in PLAIN and type(item) is kind) or (get_origin(kind) is list and type(item) is list and not item)


def _is_truth(kind: Any, item: Any) -> bool:
    """Return False for a number other than 0 and 1 in place of a truth value: OmegaConf takes any number."""
    if get_origin(kind) is list and isinstance(item, list):
        return all(_is_truth(get_args(kind)[0], entry) for entry in item)
    return bool not in (kind, *get_args(kind)) or type(item) is not int or item in (0, 1)


@functools.lru_cache(maxsize=MOST_BUILT)
def _typed(schema: type, names: tuple[str, ...]) -> Any:
    """Return OmegaConf's form of the named fields of `schema` alone: it copies all that it has at each merge."""
    kinds = _kinds(schema)
    return OmegaConf.structured(dataclasses.make_dataclass(schema.__name__, [(name, kinds[name]) for name in names]))


def _check_texts(schema: type, given: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a number or truth value in place of a text: its written form is unknown."""
    for name, item in given.items():
        field = fields_of(schema)[name]
        texts = field.type is str or (get_origin(field.type) is list and get_args(field.type)[0] is str)
        for value in (item if isinstance(item, list | tuple) else [item]) if texts else []:
            if isinstance(value, bool | int | float):
                wrong = f"{join(where, name)}: got {shortened(value)}"
                raise UserError(f"{wrong}, takes {takes(field, item)}; put it in quotes if it is a text")


def _section(field: dataclasses.Field[Any], item: Any) -> type | None:
    """Return the dataclass that builds the value `item` of a field; None for other types, and for None if that is valid."""
    kinds = get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)
    if item is None and NoneType in kinds:
        return None
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _check_keys(schema: type, given: Mapping[str, Any], where: str) -> None:
    fields = fields_of(schema)
    for key, item in given.items():
        if key not in fields and isinstance(key, str) and key.partition(".")[0] in fields:
            first, _, rest = key.partition(".")
            raise UserError(f"{join(where, key)}: a key in a file or section has no dots; write {first}: {{{rest}: ...}}")
        if key not in fields:
            raise UnknownKeyError(join(where, str(key)), [join(where, name) for name in fields if is_listed(fields[name])])
        for section, content, position in _sections(fields[key], item, join(where, key)):
            if not isinstance(content, Mapping):
                raise UserError(f"{position}: got {shortened(content)}, takes a section of keys")
            _check_keys(section, content, position)


def _sections(field: dataclasses.Field[Any], item: Any, key: str) -> list[tuple[type, Any, str]]:
    """Return (class, value, key) for a field that is a dataclass, or for each entry of its list of dataclasses."""
    if section := _section(field, item):
        return [(section, item, key)]
    (entry,) = get_args(field.type) if get_origin(field.type) is list else (None,)
    if not (dataclasses.is_dataclass(entry) and isinstance(item, list)):
        return []
    return [(entry, content, f"{key}[{index}]") for index, content in enumerate(item)]  # type: ignore[misc]


def _check_literal(item: Any, where: str) -> None:
    """Raise UserError for a text that is not UTF-8, or that OmegaConf would interpolate, such as from the environment."""
    if isinstance(item, Mapping):
        for key, option in item.items():
            _check_literal(key, where)
            _check_literal(option, join(where, str(key)))
    elif isinstance(item, list | tuple):
        for index, option in enumerate(item):
            _check_literal(option, f"{where}[{index}]")
    elif isinstance(item, str) and ("${" in item or item == "???"):
        raise UserError(
            f"{where}: contains '{'${' if '${' in item else item}', which is not interpolated here; write the value itself"
        )
    elif isinstance(item, str) and HALF.search(item):
        raise UserError(
            f"{where or 'a key'}: got {shortened(item)}, which has half a surrogate pair, not a character; remove it"
        )


def _misfit(schema: type, given: Mapping[str, Any], where: str) -> UserError | None:
    """Return the error for the first key with a value of the wrong type."""
    for field in fields_of(schema).values():
        if field.name not in given or _fits(schema, field.name, item := given[field.name]):
            continue
        key = join(where, field.name)
        for section, content, position in _sections(field, item, key):
            if error := _misfit(section, content, position):
                return error
        if error := _odd_entry(schema, field, item, key):
            return error
        about = f" ({field.metadata['help']})" if field.metadata.get("help") else ""
        return UserError(f"{key}: got {shortened(item)}, takes {takes(field, item)}{about}")
    return None


def _odd_entry(schema: type, field: dataclasses.Field[Any], item: Any, where: str) -> UserError | None:
    """Return the error for the first value of a wrong type in a section with any keys, such as {site: number}."""
    kind = next(iter(get_args(field.type)[1:]), None)
    if get_origin(field.type) is not dict or not isinstance(item, Mapping) or kind not in KINDS:
        return None
    odd = ((key, value) for key, value in item.items() if not _fits(schema, field.name, {key: value}))
    key, value = next(((key, value) for key, value in odd if isinstance(key, str)), (None, None))
    return UserError(f"{join(where, key)}: got {shortened(value)}, takes {KINDS[kind]}") if key is not None else None


def _fits(schema: type, name: str, item: Any) -> bool:
    try:
        _converted(schema, {name: item})
    except (OmegaConfBaseException, TypeError):
        return False
    return True


def _in_one_line(error: Exception, where: str) -> str:
    first = str(error).splitlines()[0]
    full = getattr(error, "full_key", None)
    key = join(where, str(full)) if full else where
    return f"{key}: {first}" if key else first
