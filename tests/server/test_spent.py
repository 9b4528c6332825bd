"""Seconds and memory of a run, over its sessions."""

import sys
import time

import psutil
import pytest

from fedloom.server.run.experiment import Spent


def test_a_session_counts_from_its_command_on_and_tells_what_was_start_up():
    spent = Spent(time.monotonic() - 30.0, {})
    spent.started("digits", 2, 3, "")
    spent.began -= 5.0
    spent.started("digits (baseline)", 2, 3, "")
    spent = Spent(time.monotonic() - 50.0, spent.entries())
    entries = spent.entries()  # it was interrupted before it started
    assert 85.0 <= entries["seconds"] < 95.0 and 30.0 <= entries["resources"]["start_up"] < 35.0


def test_the_peak_of_memory_is_that_of_the_session_that_held_most():
    now = psutil.Process().memory_info().rss
    peak = Spent(time.monotonic(), {}).entries()["resources"]["peak_memory"]
    assert 0.99 * now <= peak <= psutil.virtual_memory().total
    assert Spent(time.monotonic(), {"resources": {"peak_memory": 2**50}}).entries()["resources"]["peak_memory"] == 2**50


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_a_session_is_not_charged_with_what_one_before_it_held():
    first = Spent(time.monotonic(), {})
    held = bytearray(200 * 2**20)
    held[:: 2**12] = b"x" * len(held[:: 2**12])
    before = first.entries()["resources"]["peak_memory"]
    del held
    assert Spent(time.monotonic(), {}).entries()["resources"]["peak_memory"] < before - 150 * 2**20


@pytest.mark.parametrize("before", [{"seconds": "long"}, {"resources": 3}, {"seconds": float("nan")}])
def test_an_edited_summary_lists_no_session(before: dict[str, object]):
    assert Spent(time.monotonic(), before).entries()["seconds"] < 60.0
