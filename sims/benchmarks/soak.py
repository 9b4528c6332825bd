"""A soak: everything that can go wrong, seeded, for hundreds of rounds over Ray; then the replies that counted, inline.

Workers are killed, hang and stop; whole rounds time out; a Ray node dies and is replaced; a tenth of the replies is hostile.
Every fault has to be named and nobody else dropped, but by a round's time-out; and what is left must be the bits of the
inline engine for the same replies, a clean ledger, flat memory, and no process.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.sims.benchmarks.soak_plan import AT_A_SITE, LOST_ONCE, LOST_TWICE, NEEDS_NONE, NO_REPLY, REASONS, Plan
from fedloom.sims.benchmarks.soak_run import Dropped, Left, Soaked, over_ray, replay
from fedloom.sims.benchmarks.soak_watch import EARLY, WHAT
from fedloom.sims.report.tables import Table

MOST_GROWTH = 0.05
LONG = 100  # rounds; a shorter run need not meet every kind of fault
FULL, QUICK = (60, 300), (40, 40)  # sites, rounds


def bench(quick: bool = False) -> tuple[Table, list[dict[str, Any]]]:
    """Without and with partial sums (`quick`: a short run with them); a table of figures and verdicts, and its rows."""
    rows = [soak(*QUICK, True)] if quick else [soak(*FULL, partial_sums) for partial_sums in (False, True)]
    return table(rows), rows


def soak(sites: int, rounds: int, partial_sums: bool, node_store: bool = False) -> dict[str, Any]:
    """Over Ray, then inline; what happened, and the verdicts. `node_store`: nodes keep contributions, on one disk."""
    plan = Plan(sites, rounds)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        soaked = over_ray(plan, root / "ray", partial_sums, node_store)
        begin = time.monotonic()
        inline = replay(plan, root / "inline", soaked.dropped)
        row = {"partial_sums": partial_sums, **figures(plan, soaked), "inline_seconds": time.monotonic() - begin}
        faults = list(wrong(plan, soaked.dropped))
    found = {"all faults are named, and nobody else": not faults, **verdicts(plan, soaked, inline)}
    row |= {"wrong": [*faults, *soaked.left.problems, *soaked.running], "verdicts": found, "ok": False not in found.values()}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def figures(plan: Plan, soaked: Soaked) -> dict[str, Any]:
    """Of the run over Ray."""
    reasons = [reason for dropped in soaked.dropped.values() for reason in dropped.values()]
    asked = plan.sites * plan.rounds
    return {
        "sites": plan.sites,
        "rounds": plan.rounds,
        "seconds": soaked.seconds,
        "counted": asked - len(reasons),
        "timed_out": reasons.count(NO_REPLY),
        "rounds_timed_out": sum(NO_REPLY in dropped.values() for dropped in soaked.dropped.values()),
        "rounds_repeated": len(soaked.repeated),
        "nodes_killed": len(soaked.nodes_killed),
        "dropped": dict(kinds(plan, soaked.dropped)),
        "mib": soaked.processes.mib(),
        "growth": soaked.processes.growth(),
    }


def verdicts(plan: Plan, soaked: Soaked, inline: Left) -> dict[str, bool | None]:
    """What has to hold; None: the run was too short to tell."""
    left, growth = soaked.left, soaked.processes.growth()
    reasons = {reason for dropped in soaked.dropped.values() for reason in dropped.values()}
    every = None if plan.rounds < LONG else kinds(plan, soaked.dropped).keys() >= REASONS.keys()
    flat = {f"memory of the {what} is flat": more <= MOST_GROWTH for what, more in growth.items()} if growth else {}
    return {
        "every kind of fault was met": every,
        "rounds timed out, and nodes died": NO_REPLY in reasons and bool(soaked.nodes_killed),
        "the ledger is as it was written": not left.problems,
        "checks of the sums": all(left.checks.values()),
        "the bits of the inline engine": (left.sums, left.network) == (inline.sums, inline.network),
        "nothing is kept": not soaked.kept and not left.staging,
        "nothing is left running": not soaked.running,
        **(flat or {"memory is flat": None}),
    }


def kinds(plan: Plan, dropped: Dropped) -> Counter[str]:
    """How many replies were dropped for each kind of planned fault."""
    named = (plan.kind(site, round) for round in dropped for site, reason in dropped[round].items() if reason != NO_REPLY)
    return Counter(sorted(named))


def wrong(plan: Plan, dropped: Dropped) -> Iterator[str]:
    """Sites that were dropped without a fault, or whose fault was not told as it is."""
    contributed: set[int] = set()
    for round in range(1, plan.rounds + 1):
        for site in range(plan.sites):
            kind, reason = plan.kind(site, round), dropped[round].get(site)
            if not _right(kind, reason, site in contributed):
                yield f"round {round}, site {site}: {kind or 'no fault'}, and it {reason or 'counts'}"
        contributed |= set(range(plan.sites)) - dropped[round].keys()


def _right(kind: str, reason: str | None, contributed: bool) -> bool:
    """Whether this is what has to become of a reply: None, or why it was dropped."""
    if reason == NO_REPLY:
        return True
    if kind in (LOST_ONCE, LOST_TWICE) and not contributed:
        return reason == NEEDS_NONE
    return reason is None if kind not in REASONS else reason is not None and REASONS[kind] in reason


def table(rows: list[dict[str, Any]]) -> Table:
    """Figures and verdicts, one column for each row."""
    head = ["soak", *(f"partial sums {'on' if row['partial_sums'] else 'off'}" for row in rows)]
    shown = {
        "seconds over Ray, inline": lambda row: f"{row['seconds']:.0f}, {row['inline_seconds']:.0f}",
        "replies that counted": lambda row: row["counted"],
        "dropped for a fault of their own": lambda row: sum(row["dropped"].values()),
        "dropped when a round timed out (rounds)": lambda row: f"{row['timed_out']} ({row['rounds_timed_out']})",
        "rounds repeated, no reply having come in time": lambda row: row["rounds_repeated"],
        "workers killed, hung, stopped": lambda row: ", ".join(str(row["dropped"].get(e, 0)) for e in AT_A_SITE),
        "nodes killed": lambda row: row["nodes_killed"],
        **{
            f"{what}, MiB at the end": lambda row, what=what: f"{row['mib'][what]:.1f}{_percent(row, what)}" for what in WHAT
        },
    }
    lines = [[what, *(tell(row) for row in rows)] for what, tell in shown.items()]
    lines += [[what, *(_YES[row["verdicts"][what]] for row in rows)] for what in rows[0]["verdicts"]]
    return Table("Soak", head, lines, f"{rows[0]['sites']} sites, {rows[0]['rounds']} rounds; growth since round {EARLY}")


_YES = {True: "yes", False: "NO", None: "-"}


def _percent(row: dict[str, Any], what: str) -> str:
    return f" ({row['growth'][what]:+.1%})" if row["growth"] else ""
