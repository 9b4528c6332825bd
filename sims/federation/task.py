"""One task of an App: `python -m ...`, with the words of Flower's command on stdin, where no other user reads its token."""

import json
import sys
from importlib.metadata import entry_points


def main() -> None:
    """Do what the command does."""
    with sys.stdin:
        words = json.load(sys.stdin)
    sys.argv = words
    (command,) = entry_points(group="console_scripts", name=words[0])
    command.load()()


if __name__ == "__main__":
    main()
