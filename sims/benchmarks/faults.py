"""`fedloom bench faults`: everything that can go wrong, seeded, for hundreds of rounds over Ray; then the same inline.

Workers are killed, hang and stop. Rounds time out. A Ray node dies and is replaced. A tenth of the replies is hostile. Each
fault must be named, and no other site dropped, except when a round times out. The run must leave the bits of the inline
engine for the same replies, a clean ledger, flat memory, and no process.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.sims.benchmarks.measuring import cell
from fedloom.sims.benchmarks.processes import EARLY, WHAT
from fedloom.sims.benchmarks.soak_plan import AT_A_SITE, LOST_ONCE, LOST_TWICE, NEEDS_NONE, NO_REPLY, REASONS, Plan
from fedloom.sims.benchmarks.soak_run import Dropped, Left, Soaked, over_ray, replay
from fedloom.sims.report.tables import Table

MOST_GROWTH = 0.05
LONG = 100  # rounds; a shorter run need not meet every kind of fault
FULL, QUICK = (60, 300), (40, 40)  # sites, rounds
YES = {True: "yes", False: "NO", None: "-"}
LINES = {
    "seconds over Ray, inline": "{seconds:.0f}, {inline_seconds:.0f}",
    "replies that counted": "{counted}",
    "dropped because of a planned fault": "{faults}",
    "dropped when a round timed out (rounds)": "{timed_out} ({rounds_timed_out})",
    "rounds repeated, because no reply came in time": "{rounds_repeated}",
    "workers killed, hung, stopped": "{at_a_site}",
    "nodes killed": "{nodes_killed}",
    **{f"{what}, MiB at the end": f"{{mib[{what}]:.1f}}{{grown[{what}]}}" for what in WHAT},
}


def bench(quick: bool = False) -> tuple[Table, list[dict[str, Any]]]:
    """Run a soak without and one with partial sums (`quick`: a short one with them); return figures and verdicts."""
    rows = [soak(*QUICK, True)] if quick else [soak(*FULL, partial_sums) for partial_sums in (False, True)]
    return table(rows), rows


def soak(sites: int, rounds: int, partial_sums: bool, node_store: bool = False) -> dict[str, Any]:
    """Run all rounds with faults over Ray, then inline; return a row with figures and verdicts.

    Args:
        node_store: Nodes store contributions, in a folder that all share.
    """
    plan = Plan(sites, rounds)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        soaked = over_ray(plan, root / "ray", partial_sums, node_store)
        begin = time.monotonic()
        inline = replay(plan, root / "inline", soaked.dropped)
        row = {"partial_sums": partial_sums, **figures(plan, soaked), "inline_seconds": time.monotonic() - begin}
        faults = list(wrong(plan, soaked.dropped))
    results = {"all faults are named, and no others": not faults, **verdicts(plan, soaked, inline)}
    row |= {
        "wrong": [*faults, *soaked.left.problems, *soaked.running],
        "verdicts": results,
        "ok": False not in results.values(),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def figures(plan: Plan, soaked: Soaked) -> dict[str, Any]:
    """Return a row's figures on the run over Ray: counts of replies and faults, seconds, memory."""
    reasons = [reason for dropped in soaked.dropped.values() for reason in dropped.values()]
    return {
        "sites": plan.sites,
        "rounds": plan.rounds,
        "seconds": soaked.seconds,
        "counted": plan.sites * plan.rounds - len(reasons),
        "timed_out": reasons.count(NO_REPLY),
        "rounds_timed_out": sum(NO_REPLY in dropped.values() for dropped in soaked.dropped.values()),
        "rounds_repeated": len(soaked.repeated),
        "nodes_killed": len(soaked.nodes_killed),
        "dropped": dict(kinds(plan, soaked.dropped)),
        "mib": soaked.processes.mib(),
        "growth": soaked.processes.growth(),
    }


def verdicts(plan: Plan, soaked: Soaked, inline: Left) -> dict[str, bool | None]:
    """Return by requirement whether it holds; None means that the run was too short to know."""
    left, growth = soaked.left, soaked.processes.growth()
    reasons = {reason for dropped in soaked.dropped.values() for reason in dropped.values()}
    every = None if plan.rounds < LONG else kinds(plan, soaked.dropped).keys() >= REASONS.keys()
    flat = {f"memory of the {what} is flat": more <= MOST_GROWTH for what, more in growth.items()} if growth else {}
    return {
        "every kind of fault happened": every,
        "rounds timed out, and nodes died": NO_REPLY in reasons and bool(soaked.nodes_killed),
        "the ledger's files are unchanged": not left.problems,
        "the sums pass their checks": all(left.checks.values()),
        "the bits of the inline engine": (left.sums, left.network) == (inline.sums, inline.network),
        "no message remains in memory": not soaked.held and not left.staging,
        "no process remains": not soaked.running,
        **(flat or {"memory is flat": None}),
    }


def kinds(plan: Plan, dropped: Dropped) -> Counter[str]:
    """Count the dropped replies by the kind of planned fault."""
    named = (plan.kind(site, round) for round in dropped for site, reason in dropped[round].items() if reason != NO_REPLY)
    return Counter(sorted(named))


def wrong(plan: Plan, dropped: Dropped) -> Iterator[str]:
    """Yield a line for each site that was dropped without a fault, or whose fault was not named correctly."""
    contributed: set[int] = set()
    for round in range(1, plan.rounds + 1):
        for site in range(plan.sites):
            kind, reason = plan.kind(site, round), dropped[round].get(site)
            if not _right(kind, reason, site in contributed):
                yield f"round {round}, site {site}: {kind or 'no fault'}, but the reply was {reason or 'counted'}"
        contributed |= set(range(plan.sites)) - dropped[round].keys()


def _right(kind: str, reason: str | None, contributed: bool) -> bool:
    """Whether `reason` is right for a reply with this fault: None, or why it was dropped."""
    if reason == NO_REPLY:
        return True
    if kind in (LOST_ONCE, LOST_TWICE) and not contributed:
        return reason == NEEDS_NONE
    return reason is None if kind not in REASONS else reason is not None and REASONS[kind] in reason


def table(rows: list[dict[str, Any]]) -> Table:
    """Return figures and verdicts, one column for each row."""
    head = ["soak", *(f"partial sums {'on' if row['partial_sums'] else 'off'}" for row in rows)]
    more = [{**row, "faults": sum(row["dropped"].values()),
             "at_a_site": ", ".join(str(row["dropped"].get(event, 0)) for event in AT_A_SITE),
             "grown": {what: f" ({row['growth'][what]:+.1%})" if row["growth"] else "" for what in WHAT}}
            for row in rows]  # fmt: skip
    lines = [[what, *(cell(text, row) for row in more)] for what, text in LINES.items()]
    lines += [[what, *(YES[row["verdicts"][what]] for row in rows)] for what in rows[0]["verdicts"]]
    return Table("Soak", head, lines, f"{rows[0]['sites']} sites, {rows[0]['rounds']} rounds; growth since round {EARLY}")
