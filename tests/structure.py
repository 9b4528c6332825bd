"""Runs a command in this process; prints our files on the stack at the first gradient, and the modules that it loads."""

import json
import sys
import traceback
from pathlib import Path

import torch

import fedloom

HOME = Path(fedloom.__file__).resolve().parent


def is_ours(file: Path) -> bool:
    """Return whether a file is the project's. Its folder may have the virtual environment, as in the README."""
    return file.is_relative_to(HOME) and not file.is_relative_to(Path(sys.prefix).resolve())


def main(words: list[str]) -> None:
    """`words`: of the command `fedloom`."""
    stack: list[str] = []
    gradient = torch.autograd.grad

    def counted(*given, **named):
        if not stack:
            files = (Path(frame.filename).resolve() for frame in traceback.extract_stack())
            stack.extend(dict.fromkeys(str(file.relative_to(HOME)) for file in files if is_ours(file)))
        return gradient(*given, **named)

    torch.autograd.grad = counted
    from fedloom.sims.cli.main import app

    app(words, standalone_mode=False)
    stack.remove(str(Path(__file__).resolve().relative_to(HOME)))
    modules = sorted(name for name in sys.modules if name.partition(".")[0] == "fedloom")
    print(json.dumps({"stack": stack, "modules": modules}))


if __name__ == "__main__":
    main(sys.argv[1:])
