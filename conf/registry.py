"""Registries: a decorator files a class under a name, a configuration section picks it by that name."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from conf.errors import UserError, unknown
from conf.typed import build

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """Names to classes. Each class is a frozen dataclass whose fields are its configuration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator: file the class under `name`. Raises ValueError if the name is taken."""

        def file(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._classes[name] = cls  # type: ignore[assignment]  # C is a subclass of T; the decorator keeps its own type
            return cls

        return file

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        """The class filed under `name`; UserError with the nearest known name otherwise."""
        if not isinstance(name, str) or name not in self._classes:
            raise unknown(self.kind, name, self._classes)
        return self._classes[name]

    def build(self, section: Mapping[str, Any], where: str) -> T:
        """The instance that a section {name: ..., <its fields>} describes; `where` is the section's dotted key."""
        if "name" not in section:
            raise UserError(f"{where}.name: missing (one of: {', '.join(self.names())})")
        fields = {key: item for key, item in section.items() if key != "name"}
        return build(self.get(section["name"]), fields, where)
