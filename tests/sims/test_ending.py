"""How our processes end: with their own status, with what was said, and after the exit handlers of others."""

import subprocess
import sys

import pytest

WORDS = """
import atexit
from fedloom.sims.process import Ending
ending = Ending()
atexit.register(print, "handler")
print("said")
"""

CRASH = """
import os
class Dies:
    def __del__(self, abort=os.abort):
        abort()
dies = Dies()
ending.leave(0)
"""


@pytest.mark.parametrize(
    ("rest", "status"), [("ending.leave(0)", 0), ("ending.leave(3)", 3), ("raise SystemExit(0)", 1), ("1 / 0", 1)]
)
def test_a_process_ends_with_its_status_after_all_callbacks(rest: str, status: int):
    done = subprocess.run([sys.executable, "-c", WORDS + rest], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "said\nhandler\n")
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in rest)


def test_what_crashes_while_an_interpreter_is_taken_apart_changes_nothing():
    done = subprocess.run([sys.executable, "-c", WORDS + CRASH], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "said\nhandler\n")


@pytest.mark.parametrize("how", ["atexit.register(forever)", "threading.Thread(target=forever).start()"])
def test_what_others_leave_behind_keeps_no_process_from_ending(how: str):
    code = f"""
import threading, fedloom.sims.process
fedloom.sims.process.PATIENCE = 0.2
forever = threading.Event().wait
{how}
ending.leave(0)
"""
    done = subprocess.run([sys.executable, "-c", WORDS + code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("said")
