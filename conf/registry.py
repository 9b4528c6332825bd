"""Registries: a decorator registers a class under a name, and a configuration section selects it by that name.

Other names are entry points of installed packages (conf.plugins) or have the form `module:attribute`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from fedloom.conf.errors import UserError
from fedloom.conf.package import NAME
from fedloom.conf.plugins import offered, outside
from fedloom.conf.typed import UnknownKeyError, build

T = TypeVar("T")
C = TypeVar("C", bound=type)
Adapter = Callable[[str, Any, Mapping[str, Any], str], T]


def section_of(value: Any, where: str, example: str) -> Mapping[str, Any]:
    """Return a section of options unchanged, and a text as {"name": text}. Raise UserError for anything else."""
    section = {"name": value} if isinstance(value, str) else value
    if not isinstance(section, Mapping):
        raise UserError(f"{where}: got {value!r}, takes a name or a section such as {example}")
    return section


class Registry(Generic[T]):
    """A table of classes by name. Each is a frozen dataclass derived from `base`. Its fields are its configuration.

    Args:
        kind: What the names mean, for errors and entry points: "network".
        modules: For each module of `package`, the names that it registers. It is imported when one of them is used.
        adapter: The module of `package` whose function makes an instance of anything else, such as a plain function.
    """

    def __init__(
        self, kind: str, base: type[T] | None = None, package: str = "", modules: Mapping[str, str] | None = None,
        adapter: str = "",
    ) -> None:  # fmt: skip
        self.kind, self.base = kind, base
        self._modules = {name: f"{package}.{module}" for module, names in (modules or {}).items() for name in names.split()}
        self._adapter = f"{package}.{adapter}" if adapter else ""
        self._classes: dict[str, type[T]] = {}
        self._adapt: Adapter[T] | None = None

    def register(self, name: str) -> Callable[[C], C]:
        """Register the class under `name` (class decorator). Raise ValueError if the name is in use."""

        def file(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._classes[name] = cls  # type: ignore[assignment]  # C is a subclass of T; the decorator keeps its own type
            return cls

        return file

    def adapter(self, adapt: Adapter[T]) -> Adapter[T]:
        """Set (decorator) how to make an instance from another object, by adapt(name, object, options, where)."""
        self._adapt = adapt
        return adapt

    def names(self) -> list[str]:
        """Return all names, sorted: those of this project and of installed packages."""
        return sorted({*self._shipped(), *offered(self.kind)})

    def name_of(self, instance: T) -> str:
        """Return the name under which an instance's class is registered, else the class's own name."""
        return next((name for name, entry in self._classes.items() if entry is type(instance)), type(instance).__name__)

    def shipped(self, name: str) -> bool:
        """Return whether the name belongs to a class of this project. Import nothing."""
        return name in self._modules or (name in self._classes and self._classes[name].__module__.partition(".")[0] == NAME)

    def has_fields(self, name: str) -> bool:
        """Return whether the name belongs to a class whose fields are its options, and not to another object."""
        return self._fits(self.find(name))

    def load(self) -> None:
        """Import the modules of all shipped names, for a process that starts others by forking."""
        for module in dict.fromkeys(self._modules.values()):
            importlib.import_module(module)

    def find(self, name: str, where: str = "") -> Any:
        """Return the class or other object that a name stands for. Raise UserError as conf.plugins.outside does."""
        if isinstance(name, str) and name in self._modules and name not in self._classes:
            importlib.import_module(self._modules[name])
        if isinstance(name, str) and name in self._classes:
            return self._classes[name]
        return outside(self.kind, name, self._shipped(), f"{where or self.kind}.name")

    def get(self, name: str, where: str = "") -> type[T]:
        """Return the class of a name. Raise UserError for an unknown name, or if it is not a dataclass of type `base`."""
        entry = self.find(name, where)
        if not self._fits(entry):
            raise self._wrong(name, entry, where)
        return entry

    def build(self, section: Mapping[str, Any], where: str) -> T:
        """Build the instance that a section {name: ..., <its fields>} describes. `where`: the section's dotted key."""
        if "name" not in section:
            raise UserError(f"{where}.name: missing (one of: {', '.join(self.names())})")
        return self.create(section["name"], {key: item for key, item in section.items() if key != "name"}, where)

    def create(self, name: str, options: Mapping[str, Any], where: str) -> T:
        """Build an instance of the class or other object `name` with these options, as `build` does."""
        entry = self.find(name, where)
        if self._adapter and not self._fits(entry):
            importlib.import_module(self._adapter)
        if self._adapt and not self._fits(entry):
            return self._adapt(name, entry, options, where)
        try:
            return build(self.get(name, where), options, where)
        except UnknownKeyError as error:
            better = None if error.near else self._undeclared(name, entry, error) or self._of_others(name, error, where)
            raise better or error from None

    def _of_others(self, name: str, error: UnknownKeyError, where: str) -> UserError | None:
        """Return an error that names the classes of this project with an unknown option, or None."""
        option = error.key.removeprefix(f"{where}.")
        owners = [each for each in sorted(self._shipped()) if self._fits(entry := self.find(each))
                  and any(field.name == option for field in dataclasses.fields(entry))]  # fmt: skip
        return UserError(f"{error.key}: an option of {', '.join(owners)}, not of {name}") if owners else None

    def _undeclared(self, name: str, entry: type, error: UnknownKeyError) -> UserError | None:
        """Return an error for a user's class that only inherits from a dataclass: its own lines do not count as options."""
        if self.shipped(name) or "__dataclass_fields__" in vars(entry):
            return None
        option = error.key.rpartition(".")[2]
        how = f"write @dataclass(frozen=True, eq=False) above the class, and '{option}: TYPE = DEFAULT' as one of its lines"
        return UserError(f"{error.key}: the class {name} declares no such option; {how}")

    def _shipped(self) -> set[str]:
        return {*self._modules, *self._classes}

    def _fits(self, entry: Any) -> bool:
        return isinstance(entry, type) and dataclasses.is_dataclass(entry) and issubclass(entry, self.base or object)

    def _wrong(self, name: str, entry: Any, where: str) -> UserError:
        what = f"the class {entry.__name__}" if isinstance(entry, type) else f"of the type {type(entry).__name__}"
        takes = f"a dataclass derived from {self.base.__module__}.{self.base.__name__}" if self.base else "a dataclass"
        return UserError(f"{where or self.kind}.name: '{name}' is {what}, takes {takes}")
