"""How to read a certificate's measurements, and whether they show that the network has forgotten."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.clients.data import label, outputs
from fedloom.conf.metrics import ACCURACY, Facts
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.server.run_folder.scores import first_metric, headline

LINES, SHOWN, STILL = "lines", "shown", "still_known"
CHANCE_AUC = 0.5
ERRORS = 2.0  # standard errors that count as a difference


def readings(config: Config, names: Sequence[str], members: Sequence[Site], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return how to read the evidence about forgotten sites.

    Args:
        config: The run's configuration.
        names: The forgotten sites.
        members: The remaining sites.
        evidence: The certificate's evidence (server.unlearning.evidence).

    Returns:
        LINES: a text for each measurement. STILL: reasons why the network still knows the sites. SHOWN: "yes" if something
        of the sites was detectable before and is not now, "no" if there is a reason, "not measurable" otherwise.
    """
    sites = [site for site in config.roster if site.name in names and "not_measured" not in (evidence.get("after") or {})]
    shared = {label(site.spec) for site in members}
    lines, still, detectable = list[str](), list[str](), False
    for site in sites:
        chance = _chance(config, site)
        for found in (*_domain(evidence, label(site.spec), chance), *_attacks(evidence, site.name)):
            lines.append(found.line)
            if isinstance(found, _Domain) and found.domain in shared:
                continue  # others have this kind of data, so a good network knows it
            detectable |= found.detectable
            still += [found.reason] if found.detectable and found.remains else []
        lines += _relearning(evidence, site.name)
    if same := _same_bits(evidence):
        still.append(same)
    shown = "no" if still else "yes" if detectable else "not measurable"
    return {LINES: list(dict.fromkeys(lines)), STILL: list(dict.fromkeys(still)), SHOWN: shown}


def outcome(content: Mapping[str, Any], names: str, advice: bool = True) -> str:
    """Return a certificate's outcome as words. Without forgetting, it does not read as a success.

    `names`: the sites. `advice`: also say what the operator can do then.
    """
    found = content.get("readings") or {}
    if found.get(SHOWN) == "not measurable":
        return f"the contributions of {names} are removed; no measurement shows whether the network has forgotten"
    if found.get(SHOWN) != "no":
        return f"{names} forgotten"
    text = f"the contributions of {names} are removed, but the network has not forgotten: {'; '.join(found[STILL])}"
    if not advice:
        return text
    options = "--rollback" if content.get("options", {}).get("restore") else "--restore N or --rollback"
    again = f"In a copy of the run from before the request, `unlearn` with {options} can remove more (not in all methods)"
    return f"{text}. {again}"


@dataclass(frozen=True)
class _Domain:
    """The first metric on the test examples of a forgotten site's domain, before and after the request, and retrained."""

    domain: str
    metric: Facts
    samples: int
    chance: float
    before: float
    after: float
    retrained: float | None

    @property
    def line(self) -> str:
        text, name = self.metric.text, self.metric.caption
        more = f", {text(self.retrained)} of a network retrained without the site" if self.retrained is not None else ""
        guess = f"; guessing gives about {text(self.chance)}" if self.metric.name == ACCURACY else ""
        wanted = "The same as retrained is ideal" if more else "--retrain measures the value to compare with"
        return f"{name} on {self.domain}: {text(self.before)} before, {text(self.after)} after{more}{guess}. {wanted}."

    @property
    def detectable(self) -> bool:
        return self.metric.name == ACCURACY and self.before > self.chance + ERRORS * self._error(self.before)

    @property
    def remains(self) -> bool:
        """Whether the network still knows the domain, by a margin of ERRORS standard errors.

        With a retrained network: its accuracy is above the retrained one's, and nearer to the one before. Without: it
        is not below the one before.
        """
        if self.retrained is None:
            return self.after >= self.before - ERRORS * self._error(self.before, self.after)
        clear = self.after > self.retrained + ERRORS * self._error(self.after, self.retrained)
        return clear and self.after - self.retrained > self.before - self.after

    @property
    def reason(self) -> str:
        text = self.metric.text
        return f"{self.metric.title} on {self.domain} is {text(self.after)}, and was {text(self.before)}"

    def _error(self, *shares: float) -> float:
        """Return the standard error of a difference of shares, or of one share."""
        return math.sqrt(sum(share * (1 - share) for share in shares) / max(1, self.samples))


@dataclass(frozen=True)
class _Attack:
    """A membership attack on a forgotten site's training examples."""

    site: str
    name: str
    stages: Mapping[str, Mapping[str, float]]

    @property
    def line(self) -> str:
        words = [
            f"{stage} {each['auc']:.2f} ({each['low']:.2f} to {each['high']:.2f})" for stage, each in self.stages.items()
        ]
        return (f"Membership of {self.site}'s training examples, attack '{self.name}', AUC: {', '.join(words)}. "
                f"{CHANCE_AUC} is chance, 1.0 recognises all.")  # fmt: skip

    @property
    def detectable(self) -> bool:
        return self.stages["before"]["low"] > CHANCE_AUC

    @property
    def remains(self) -> bool:
        """Whether the attack still works, and has lost less than half of what it had above chance or above retrained."""
        before, after = self.stages["before"]["auc"], self.stages["after"]
        floor = max(CHANCE_AUC, self.stages.get("retrained", {}).get("auc", CHANCE_AUC))
        return after["low"] > CHANCE_AUC and after["auc"] - floor > (before - floor) / 2

    @property
    def reason(self) -> str:
        return f"attack '{self.name}' still recognises training examples of {self.site}"


def _domain(evidence: Mapping[str, Any], domain: str, chance: float) -> Iterator[_Domain]:
    """Yield the metric on a domain, if it was measured before and after."""
    before, after, retrained = (headline(evidence.get(name) or {}).get(domain) for name in ("before", "after", "retrained"))
    if before is not None and after is not None:
        metric = first_metric(evidence["after"])
        yield _Domain(domain, metric, evidence.get("samples", {}).get(domain, 0), chance, before, after, retrained)


def _attacks(evidence: Mapping[str, Any], site: str) -> Iterator[_Attack]:
    stages = {name: (evidence.get(name) or {}).get("membership", {}).get(site) or {} for name in
              ("before", "after", "retrained")}  # fmt: skip
    for name, each in sorted(stages["after"].items()):
        if isinstance(each, Mapping) and name in stages["before"]:
            yield _Attack(site, name, {stage: found[name] for stage, found in stages.items() if name in found})


def _relearning(evidence: Mapping[str, Any], site: str) -> list[str]:
    starts = evidence.get("relearning", {}).get(site) or {}
    steps = {name: each["steps"] for name, each in starts.items() if isinstance(each, Mapping)}
    if not steps:
        return []
    counts = {name: "more than were tried" if number is None else str(number) for name, number in steps.items()}
    fresh = f", {counts['fresh']} from an untrained network" if "fresh" in counts else ""
    return [f"Steps to relearn {site}'s data: {counts['forgotten']} from this network{fresh}. Few steps mean that it still "
            "holds much of what is needed, from this site or from others."]  # fmt: skip


def _same_bits(evidence: Mapping[str, Any]) -> str:
    digests = [(evidence.get(stage) or {}).get("network") for stage in ("before", "after")]
    return "the network has the same bits as before" if digests[0] and digests[0] == digests[1] else ""


def _chance(config: Config, site: Site) -> float:
    """Return the accuracy of guessing among the site's classes."""
    block = outputs(config, site.spec)
    return 1.0 / max(1, block.stop - block.start)
