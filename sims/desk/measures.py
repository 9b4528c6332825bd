"""The desk's numbers for Prometheus, in its text format."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime

from fedloom.sims.desk.desk import Desk
from fedloom.sims.desk.details import training_of

MOST_REASONS, MOST_TEXT = 20, 60
MEASURES = {  # by name: its type, what it is
    "fedloom_run_running": ("gauge", "1 if a server works on the run"),
    "fedloom_rounds_total": ("counter", "committed rounds"),
    "fedloom_rounds_planned": ("gauge", "rounds in the configuration"),
    "fedloom_replies_total": ("counter", "replies of sites that counted"),
    "fedloom_dropped_replies_total": ("counter", "replies that were dropped, by reason"),
    "fedloom_round_seconds_total": ("counter", "seconds of all rounds"),
    "fedloom_traffic_bytes_total": ("counter", "bytes of arrays, by direction"),
    "fedloom_run_bytes": ("gauge", "size of the run's folder"),
    "fedloom_requests_open": ("gauge", "requests that are not certified yet"),
    "fedloom_oldest_request_seconds": ("gauge", "age of the oldest open request"),
    "fedloom_webhook_undelivered": ("gauge", "messages that the webhook's receiver has not accepted yet"),
}
Row = tuple[str, dict[str, str], float]


def text(desk: Desk) -> str:
    """Return the measures of all runs. Runs that cannot be read are left out."""
    rows: dict[str, list[Row]] = {name: [] for name in MEASURES}
    for run in desk.runs.paths():
        with suppress(Exception):  # its files may be damaged in any way
            for row in _rows(desk, run):
                rows[row[0]].append(row)
    lines = []
    for name, (kind, what) in MEASURES.items():
        lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *map(_line, rows[name])]
    return "\n".join(lines) + "\n"


def _rows(desk: Desk, id: str) -> Iterable[Row]:
    run, training = desk.runs.get(id), desk.runs.cached(id, training_of)
    label = {"run": id}
    yield "fedloom_run_running", label, float(run.running)
    yield "fedloom_rounds_total", label, run.round
    yield "fedloom_rounds_planned", label, run.rounds
    yield "fedloom_replies_total", label, training.replies
    for reason, many in _reasons(why for _, _, why in training.dropped).items():
        yield "fedloom_dropped_replies_total", {**label, "reason": reason}, many
    yield "fedloom_round_seconds_total", label, training.seconds
    yield "fedloom_traffic_bytes_total", {**label, "direction": "to_sites"}, training.sent
    yield "fedloom_traffic_bytes_total", {**label, "direction": "from_sites"}, training.received
    yield "fedloom_run_bytes", label, run.bytes
    yield "fedloom_webhook_undelivered", label, sum(many for key, many in [*desk.undelivered.items()] if _is_of(key, id))
    waiting = [one.times.get("received", "") for one in desk.requests(id) if one.is_open]
    yield "fedloom_requests_open", label, len(waiting)
    yield "fedloom_oldest_request_seconds", label, max((_age(time) for time in waiting if time), default=0.0)


def _reasons(texts: Iterable[str]) -> dict[str, int]:
    """Count reasons without their numbers, so that labels stay few."""
    counts = Counter(re.sub(r"\d[\d.,]*", "N", text)[:MOST_TEXT] for text in texts)
    common = dict(counts.most_common(MOST_REASONS))
    rest = sum(counts.values()) - sum(common.values())
    return {**common, **({"other": rest} if rest else {})}


def _is_of(key: str, run: str) -> bool:
    return key.partition("/")[0] == run


def _age(time: str) -> float:
    """Return the seconds since a time; 0 for one in the future, as after a clock was set back."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


def _line(row: Row) -> str:
    name, labels, value = row
    inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
    return f"{name}{{{inside}}} {value:.10g}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
