"""Registries: names of this project, entry points of installed packages, module:attribute; messages about others."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf import UserError
from fedloom.conf.plugins import call, imported, is_reference, offered, outside
from fedloom.conf.registry import Registry
from fedloom.conf.typed import option


@dataclass(frozen=True)
class Kind(ABC):
    """What the registry of these tests holds."""

    number: int = option(1, "a number", low=0)

    @abstractmethod
    def doubled(self) -> int:
        """Twice the number."""


KINDS: Registry[Kind] = Registry("strategy", Kind)


@KINDS.register("ours")
@dataclass(frozen=True)
class Ours(Kind):
    def doubled(self) -> int:
        return 2 * self.number


MODULE = """
from dataclasses import dataclass

{imports}
from {here} import Kind


@dataclass(frozen=True)
class Theirs(Kind):
    extra: str = "x"

    def doubled(self):
        return 2 * self.number


@dataclass(frozen=True)
class Unfinished(Kind):
    pass


@dataclass(frozen=True)
class Odd(Kind):
    extra: "list[object] | dict | complex" = None

    def doubled(self):
        return 0


class Plain:
    pass


class Undeclared(Kind):
    power: int = 2

    def doubled(self):
        return 2 * self.number


@dataclass(frozen=True)
class Checked(Theirs):
    def __post_init__(self):
        raise ValueError("extra and number go together")


class Nested:
    Theirs = Theirs


thing = Theirs()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with entry points as pip leaves it, in a folder on the search path. Its module says when it is imported."""
    (tmp_path / "my_method.py").write_text(MODULE.format(here=__name__, imports="print('imported')"))
    (tmp_path / "my_broken.py").write_text("def f(:\n")
    (tmp_path / "my_failing.py").write_text("raise RuntimeError('first line\\nsecond')\n")
    (tmp_path / "my_lacking.py").write_text("import nobody_has_this.part\n")
    for name, lines in {
        "my_method": "theirs = my_method:Theirs\ntwice = my_method:Theirs\nlost = my_metod:Theirs",
        "other": "twice = other:Thing",
    }.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fedloom.strategies]\n{lines}\n")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Kind.__module__])
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_method", "my_failing", "my_lacking"):
        sys.modules.pop(name, None)


def test_an_entry_point_is_imported_when_it_is_asked_for_and_not_before(package: Path, capsys: pytest.CaptureFixture[str]):
    assert KINDS.names() == ["lost", "ours", "theirs", "twice"] and offered("strategy") == ["lost", "theirs", "twice"]
    assert KINDS.get("ours") is Ours
    assert KINDS.build({"name": "ours"}, "strategy").doubled() == 2
    assert "my_method" not in sys.modules
    assert KINDS.build({"name": "theirs", "number": 4}, "strategy").doubled() == 8
    assert capsys.readouterr().out == "imported\n"
    assert KINDS.get("theirs") is KINDS.get("my_method:Theirs") is KINDS.get("my_method:Nested.Theirs")


def test_a_class_of_this_project_without_options_lists_what_it_takes(package: Path, monkeypatch: pytest.MonkeyPatch):
    class Bare(Ours):
        """Takes the options of Ours."""

    monkeypatch.setitem(KINDS._classes, "bare", Bare)
    monkeypatch.setattr(Bare, "__module__", "fedloom.server.strategies.bare")
    with pytest.raises(UserError, match=r"^unknown key 'strategy\.xyz' \(known: strategy\.number\)$"):
        KINDS.build({"name": "bare", "xyz": 3}, "strategy")


def test_what_a_package_offers_is_gone_with_it(package: Path):
    assert "theirs" in KINDS.names()
    sys.path.remove(str(package))
    assert KINDS.names() == ["ours"]


def test_only_classes_of_this_project_are_shipped(package: Path, monkeypatch: pytest.MonkeyPatch):
    assert not KINDS.shipped("ours")  # this module is a test
    monkeypatch.setattr(Ours, "__module__", "fedloom.server.strategies.ours")
    assert KINDS.shipped("ours")
    assert not any(map(KINDS.shipped, ("theirs", "my_method:Theirs", "", "nobody")))
    assert "my_method" not in sys.modules


@pytest.mark.parametrize(
    "section, message",
    [
        ({}, r"^strategy\.name: missing \(one of: lost, ours, theirs, twice\)$"),
        ({"name": "ous"}, r"^unknown strategy 'ous'; did you mean 'ours'\? \(known: lost, ours, theirs, twice\)$"),
        ({"name": "their"}, r"^unknown strategy 'their'; did you mean 'theirs'\?"),
        (
            {"name": "my_method:Undeclared", "power": 3},
            r"^strategy\.power: the class my_method:Undeclared declares no such option; write @dataclass\(frozen=True, "
            r"eq=False\) above the class, and 'power: TYPE = DEFAULT' as one of its lines$",
        ),
        ({"name": "my_method:Undeclared", "numbr": 3}, r"did you mean 'strategy\.number'\?"),
        ({"name": 3}, r"^unknown strategy '3'"),
        ({"name": None}, r"^unknown strategy 'None'"),
        (
            {"name": "twice"},
            r"^strategy\.name: 'twice' means (my_method:Theirs and other:Thing|other:Thing and my_method:Theirs);",
        ),
        ({"name": "lost"}, r"^strategy\.name: cannot find module 'my_metod' \(of 'my_metod:Theirs'\); install it, or start"),
        ({"name": "no.such:Thing"}, r"^strategy\.name: cannot find module 'no' \(of 'no\.such:Thing'\)"),
        ({"name": "my_method.part:Thing"}, r"^strategy\.name: cannot find module 'my_method\.part'|is not a package"),
        ({"name": "my_method:Their"}, r"^strategy\.name: 'my_method:Their' has no 'Their'; did you mean 'Theirs'\?$"),
        (
            {"name": "my_method:thing"},
            r"^strategy\.name: 'my_method:thing' is of the type Theirs, takes a dataclass derived",
        ),
        ({"name": "my_method:Plain"}, r"is the class Plain, takes a dataclass derived from .*Kind$"),
        ({"name": "my_method:Unfinished"}, r"^strategy: .*abstract"),
        ({"name": "my_method:Odd"}, r"^strategy: .*Unsupported type"),
        ({"name": "my_method:Checked"}, r"^strategy: ValueError: extra and number go together$"),
        ({"name": "my_broken:f"}, r"^strategy\.name: module 'my_broken' cannot be imported \(SyntaxError: .*\)$"),
        ({"name": "my_failing:f"}, r"^strategy\.name: module 'my_failing' cannot be imported \(RuntimeError: first line\)$"),
        (
            {"name": "my_lacking:f"},
            r"'my_lacking' cannot be imported \(ModuleNotFoundError: No module named 'nobody_has_this'\)$",
        ),
        ({"name": "theirs", "numbr": 1}, r"^unknown key 'strategy\.numbr'; did you mean 'strategy\.number'\?"),
        ({"name": "theirs", "number": -1}, r"^strategy\.number: got -1, takes a number of at least 0$"),
        ({"name": "theirs", "number": "x"}, r"^strategy\.number: "),
    ],
)
def test_what_cannot_be_is_reported_in_one_line(package: Path, section: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as caught:
        KINDS.build(section, "strategy")
    assert "\n" not in str(caught.value)


def test_modules_of_ours_are_found_by_the_names_of_earlier_versions(package: Path):
    found = imported("sims.experiments.unlearning.averaging:Averaging", "strategy.name")
    assert found.__module__ == "fedloom.sims.experiments.unlearning.averaging"
    (package / "my_server.py").write_text("from server.strategies import Strategy\n")
    message = r"cannot find module 'server.*'; server is part of the package fedloom: import fedloom\.server$"
    with pytest.raises(UserError, match=message):
        imported("my_server:Strategy", "strategy.name")


def test_a_package_of_the_users_comes_before_an_earlier_name_of_ours(package: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "clients")
    (package / "clients").mkdir()
    (package / "clients" / "__init__.py").touch()
    (package / "clients" / "networks.py").write_text("mine = 7\n")
    assert imported("clients.networks:mine", "network.name") == 7
    monkeypatch.delitem(sys.modules, "clients.networks")


def test_a_name_of_this_project_is_never_another_packages(package: Path):
    (package / "my_method-1.0.dist-info" / "entry_points.txt").write_text("[fedloom.strategies]\nours = my_method:Theirs\n")
    sys.path.append(str(package / "nowhere"))  # entry points are looked up once for each search path
    try:
        assert KINDS.get("ours") is Ours
    finally:
        sys.path.remove(str(package / "nowhere"))


@pytest.mark.parametrize(
    "name, it_is",
    [("a:b", True), ("a.b:c.d", True), ("vgg13:norm=batch", False), ("a:", False), (":a", False), ("a.:b", False),
     ("a:b:c", False), ("a/b:c", False), ("images:/x", False), ("a", False), (3, False), (None, False)],
)  # fmt: skip
def test_references(name: object, it_is: bool):
    assert is_reference(name) == it_is


def test_groups_are_named_in_the_plural(package: Path):
    with pytest.raises(UserError, match="unknown network 'theirs'"):
        outside("network", "theirs", [], "network.name")
    assert outside("strategy", "theirs", [], "strategy.name").__name__ == "Theirs"


def test_a_function_is_called_with_what_fits_it():
    def function(a: int, b: int = 2, *, c: int) -> tuple[int, int, int]:
        return a, b, c

    assert call(function, {"a": 1}, {"c": 3}, "m:f", "section") == (1, 2, 3)
    for options, message in {
        "a": r"^section\.c: missing; 'm:f' needs it$",
        "d": r"^unknown option of 'm:f' 'section\.d'; did you mean 'section\.\w'\? \(known: section\.a, section\.b, sec",
    }.items():
        with pytest.raises(UserError, match=message):
            call(function, {options: 1}, {}, "m:f", "section")
    with pytest.raises(UserError, match=r"^section: 'int' failed \(ValueError: "):
        call(lambda: int("x"), {}, {}, "int", "section")
