#!/usr/bin/env python3
"""Flag the worst of unclear English: in Markdown, and in the docstrings and messages of Python files.

    .ci/plain_english.py [PATH ...]    all tracked files without PATH; exit code 1 if anything is flagged

CONTRIBUTING.md has the style guide. Put `plain: ignore` in a comment on a line that has to stay.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST = 32  # words of a sentence
RULES = [
    (r"(?:is|are|was|were) no (?!longer\b|more\b)[a-z]+", 'write "is not a ...", "is not valid", "has no ..."'),
    (r"(?-i:(?:is|are) none)\b(?! of)", 'write "there is no ...", "has no ..."'),
    (r"to be had", 'write "is not available"'),
    (r"tol[d]", 'name who sends or reports what: "sends", "receives", "reports"'),
    (r"tells? (?:nothing|them|it|him) (?:of|about|apart)", 'write "sends", "reports", "distinguishes"'),
    (r"whoever|whosoever|whichever of", 'write "anyone who", "the one that"'),
    (r"alike", 'write "the same", "in the same way", "both"'),
    (r"but for", 'write "except"'),
    (r"(?:a|an|one|some|files?|class|names?) of (?:its|their|his|your|our) own", 'write "its own ...", "their own ..."'),
    (r"of (?:theirs|yours|ours)", 'write "their ...", "your ..."'),
    (r"beside", 'write "next to", "with", "in addition to", "compared with"'),
    (r"present (?:round|rounds|weights|server|run|one|state|names?|parameters|values?)", 'write "current"'),
    (r"nobody(?:'s)?", 'write "no one", "no site"'),
    (r"kept|keeps? to", 'write "stored", "saved", "unchanged", "retained", "follows"'),
    (r"given", 'leave it out, or name it: "the argument", "set", "provided"'),
    (r"(?<!not )(?<!be )(?<!were )(?<!was )(?<!is )(?<!are )found", 'name what it is: "result", "state", "match"'),
    (r"go(?:es)? on", 'write "continues"'),
    (r"any ?more", 'write "no longer"'),
    (r"in words", 'write "as text"'),
    (r"as (?:it|they) (?:was|were)", 'write "unchanged"'),
    (r"need not", 'write "does not need to"'),
    (r"all the same|at all events|by and by|for want of|in so far|so much as", "use a simpler phrase"),
    (r"wherein|thereof|therein|thereby|hereby|whereof|hence|thus", "use a simpler word"),
    (r"such (?:a|an) one|the like\b|and such", 'name it, or write "for example"'),
    (r"(?:take|takes|taking|took) part", 'write "participate"'),
    (r"of (?:any|every|each) kind|kinds of [a-z]+ that there are", 'write "any", "all"'),
    (r"that there (?:is|are)", 'leave it out, or write "available"'),
    (r"what (?:is|was|are) (?:said|done|there|left|known|asked|sent|wrong) (?:of|about|with|by|to)", "name the thing"),
]
WORD = re.compile("|".join(rf"\b(?P<r{i}>{pattern})\b" for i, (pattern, _) in enumerate(RULES)), re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, paragraph) of a file's English."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
        yield from paragraphs(text, 1)
        return
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2):
            continue
        if "plain: ignore" not in lines[(node.end_lineno or node.lineno) - 1]:
            yield from paragraphs(node.value, node.lineno)


def paragraphs(text: str, first: int) -> Iterator[tuple[int, str]]:
    line, gathered = first, []
    for row in [*text.split("\n"), ""]:
        row = re.sub(r"`[^`]*`", "X", row.strip())
        row = re.sub(r"\]\([^)]*\)", "]", row)
        new = (
            not row
            or row[0] in "|#-*>"
            or row.startswith(("Args:", "Returns:", "Raises:"))
            or re.match(r"\d+\. |\w+: ", row)
        )
        if new and gathered:
            yield line - len(gathered), " ".join(gathered)
            gathered = []
        if row.startswith("|"):
            yield from ((line, cell.strip()) for cell in row.split("|") if cell.strip())
        elif row:
            gathered.append(row)
        line += 1


def faults(text: str) -> Iterator[tuple[str, str]]:
    for match in WORD.finditer(text):
        yield match[0], RULES[int(str(match.lastgroup)[1:])][1]
    for sentence in re.split(r"(?<=[.!?:;])\s", text):
        if len(sentence.split()) > LONGEST:
            yield " ".join(sentence.split()[:6]) + " ...", f"{len(sentence.split())} words; at most {LONGEST} in a sentence"


def main() -> int:
    named = sys.argv[1:] or ["."]
    tracked = subprocess.run(["git", "ls-files", *named], capture_output=True, text=True, check=True).stdout.split()
    count = 0
    for name in tracked:
        if (
            not name.endswith((".md", ".py"))
            or name == "CONTRIBUTING.md"
            or (name.startswith(("tests/", ".ci/")) and name.endswith(".py"))
        ):
            continue
        for line, text in prose(Path(name)):
            for what, why in faults(text):
                print(f"{name}:{line}: {what!r}: {why}")
                count += 1
    print(f"{count} flagged" if count else "plain English: nothing flagged")
    return int(bool(count))


if __name__ == "__main__":
    raise SystemExit(main())
