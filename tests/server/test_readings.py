"""How a certificate's measurements are read, and when a request counts as forgotten."""

from typing import Any

import pytest

from fedloom.conf import Config, load
from fedloom.server.unlearning.readings import LINES, SHOWN, STILL, outcome, readings

ONE = "site-0001"


@pytest.fixture(scope="module")
def config() -> Config:
    """Two sites with digits at their own angles."""
    return load("digits", ["sites=[{domain: digits}, {domain: digits, rotation: 90}]", "engine.name=inline"])


def evidence(before: float, after: float, auc: tuple[float, float] = (0.5, 0.5), **more: Any) -> dict[str, Any]:
    domain = "digits_r90"

    def stage(share: float, area: float, network: str) -> dict[str, Any]:
        attack = {"auc": area, "low": area - 0.02, "high": area + 0.02, "members": 100, "others": 100}
        return {"network": network, "accuracy": {domain: share, "union": share}, "membership": {ONE: {"loss": attack}}}

    retrained = {name: stage(share, 0.5, "c") for name, share in more.items()}
    return {"samples": {domain: 400}, "before": stage(before, auc[0], "a"), "after": stage(after, auc[1], "b"), **retrained}


def read(config: Config, found: dict[str, Any], staying: int = 1) -> dict[str, Any]:
    return readings(config, [ONE], config.roster[:staying], found)


@pytest.mark.parametrize(
    ("found", "shown", "still"),
    [
        (evidence(0.9, 0.2), "yes", []),
        (evidence(0.9, 0.89), "no", ["accuracy on digits_r90 is 89.0%, and was 90.0%"]),
        (evidence(0.9, 0.85, retrained=0.86), "yes", []),  # the others' data teach it, too
        (evidence(0.9, 0.8, retrained=0.3), "no", ["accuracy on digits_r90 is 80.0%, and was 90.0%"]),
        (evidence(0.9, 0.2, (0.7, 0.69)), "no", ["attack 'loss' still recognises training examples of site-0001"]),
        (evidence(0.9, 0.2, (0.7, 0.53)), "yes", []),
        (evidence(0.1, 0.1), "not measurable", []),
    ],
)
def test_a_request_counts_as_forgotten_only_if_something_was_known_and_is_not_now(
    config: Config, found: dict[str, Any], shown: str, still: list[str]
):
    result = read(config, found)
    assert (result[SHOWN], result[STILL]) == (shown, still)


def test_accuracy_on_data_that_others_have_is_not_a_trace(config: Config):
    result = read(config, evidence(0.9, 0.9), staying=2)
    assert (result[SHOWN], result[STILL]) == ("not measurable", [])
    assert outcome({"readings": result}, ONE) == (
        "the contributions of site-0001 are removed; no measurement shows whether the network has forgotten"
    )


def test_each_measurement_has_one_line_with_its_reference(config: Config):
    found = evidence(0.9, 0.2, (0.7, 0.52), retrained=0.25)
    found["relearning"] = {ONE: {"forgotten": {"steps": 12}, "fresh": {"steps": None}}}
    accuracy, attack, relearning = read(config, found)[LINES]
    assert accuracy == ("Accuracy on digits_r90: 90.0% before, 20.0% after, 25.0% of a network retrained without the site; "
                        "guessing gives about 10.0%. The same as retrained is ideal.")  # fmt: skip
    assert "before 0.70 (0.68 to 0.72), after 0.52" in attack and "0.5 is chance" in attack
    assert relearning.startswith("Steps to relearn site-0001's data: 12 from this network, more than were tried from an")


def test_equal_bits_are_never_forgotten(config: Config):
    found = evidence(0.1, 0.1)
    found["after"]["network"] = "a"
    result = read(config, found)
    assert result[STILL] == ["the network has the same bits as before"]
    assert outcome({"readings": result}, ONE) == (
        "the contributions of site-0001 are removed, but the network has not forgotten: the network has the same bits as "
        "before. In a copy of the run from before the request, `unlearn` with --restore N or --rollback can remove more "
        "(not in all methods)"
    )


def test_without_measurements_there_is_nothing_to_read(config: Config):
    nothing = {"accuracy": {}, "membership": {}, "not_measured": "the images are the sites' own"}
    assert read(config, {"before": nothing, "after": nothing}) == {LINES: [], STILL: [], SHOWN: "not measurable"}
