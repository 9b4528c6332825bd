"""How the code hangs together: floors, no circles, a short way to the gradient, READMEs that list every file."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

HOME = Path(__file__).resolve().parents[1]
FLOORS = ("conf", "fusion", "clients", "server", "sims")  # from the ground up
MOST_ON_STACK, MOST_MODULES = 10, 200
AT_ROOTS = {"clients": {"app.py", "job.py", "work.py"}, "server": {"app.py"}}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """By module what it imports, for types too."""
    graph = grimp.build_graph("fedloom", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_floor_imports_a_higher_one(imports: dict[str, set[str]]) -> None:
    def floor(module: str) -> int:
        parts = module.split(".")
        return FLOORS.index(parts[1]) if len(parts) > 1 else len(FLOORS)  # the package itself is the API, above all

    assert [(module, one) for module, found in imports.items() for one in found if floor(one) > floor(module)] == []


def test_there_are_no_circles(imports: dict[str, set[str]]) -> None:
    tuple(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError, which names one


@pytest.mark.parametrize("folder", sorted(AT_ROOTS))
def test_few_files_are_at_the_roots(folder: str) -> None:
    assert {path.name for path in (HOME / folder).glob("*.py")} - {"__init__.py"} <= AT_ROOTS[folder]


def test_the_way_to_the_gradient_is_short(tmp_path: Path) -> None:
    words = ["run", "digits", "engine.name=inline", "rounds=1", "training.steps=1", f"run.root={tmp_path}"]
    done = subprocess.run(
        [sys.executable, HOME / "tests/structure.py", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["stack"]) <= MOST_ON_STACK, found["stack"]
    assert len(found["modules"]) <= MOST_MODULES, found["modules"]


@pytest.mark.parametrize(("method", "most"), [("fedavg", 7), ("fedprox", 25), ("scaffold", 80)])
def test_a_method_is_little_more_than_its_idea(method: str, most: int) -> None:
    """Lines of both halves, without blanks, comments and docstrings."""
    halves = (HOME / "clients/objectives" / f"{method}.py", HOME / "server/strategies" / f"{method}.py")
    assert sum(map(_lines, halves)) <= most


def _lines(path: Path) -> int:
    text, aside = path.read_text(encoding="utf-8"), set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            aside |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(number not in aside and bool(line) and not line.startswith("#") for number, line in lines)


@pytest.mark.parametrize(
    "readme",
    sorted(path for floor in FLOORS for path in (HOME / floor).rglob("README.md")),
    ids=lambda path: str(path.parent.relative_to(HOME)),
)
def test_every_readme_lists_the_files_beside_it(readme: Path) -> None:
    text = readme.read_text(encoding="utf-8")
    beside = {path.name for path in readme.parent.glob("*.py")} - {"__init__.py", "__main__.py"}
    rooms = {f"{path.parent.name}/" for path in readme.parent.glob("*/__init__.py")}
    assert sorted(name for name in beside | rooms if f"`{name}`" not in text and f"[{name}]" not in text) == []


LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = sorted(
    [*HOME.glob("*.md"), *(page for room in (*FLOORS, "tests", "deploy") for page in (HOME / room).rglob("*.md"))]
)


def _anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(HOME)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        where, _, anchor = link.partition("#")
        target = (page.parent / where).resolve() if where else page
        there = target / "README.md" if target.is_dir() else target
        if "://" not in link and (not target.exists() or (anchor and anchor not in _anchors(there))):
            broken.append(link)
    assert broken == []
