"""Fedloom as a library: what a user of Python passes, and what comes back."""

import pytest

from fedloom.sims.operations.unlearn import UnlearningRequest


def test_options_of_a_request_are_named():
    with pytest.raises(TypeError):
        UnlearningRequest(["site-0001"], "r1", "asked", 1, True)  # type: ignore[misc]
    assert UnlearningRequest(["site-0001"], "r1", "asked", repair=1, retrain=True).options["retrain"]
