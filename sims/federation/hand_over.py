"""What a node of ours runs as `flwr-clientapp`: hands its words to the process that waits (sims.federation.warm), and ends.

Started by the node for every message, it imports next to nothing; the first one starts the process that waits.
"""

import json
import socket
import subprocess
import sys
import time

DOOR = "clientapp.socket"  # in the node's folder, where its programs run
START_SECONDS, PAUSE_SECONDS = 60.0, 0.05
PARENT = "--parent-pid"  # the option by which Flower's program says with whom a ClientApp ends


def hand_over(words: list[str]) -> None:
    """Give the words to the process that waits. OSError if there is none."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(DOOR)
        line.sendall(json.dumps(words).encode() + b"\n")


def main(words: list[str]) -> None:
    """Hand over, if need be to a process that is started first. Raises OSError if that does not come."""
    try:
        hand_over(words)
        return None
    except OSError:
        subprocess.Popen([sys.executable, "-m", "sims.federation.warm", words[words.index(PARENT) + 1]])
    deadline = time.monotonic() + START_SECONDS
    while True:
        time.sleep(PAUSE_SECONDS)
        try:
            return hand_over(words)
        except OSError:
            if time.monotonic() > deadline:
                raise


if __name__ == "__main__":
    main(sys.argv[1:])
