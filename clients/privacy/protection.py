"""Protect a site's contribution before it leaves, by noise, masks or both."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ArrayRecord

from fedloom.clients.job import Job
from fedloom.clients.objectives import Session
from fedloom.clients.privacy.changes import changes, keep_sent
from fedloom.clients.privacy.differential import private, spend
from fedloom.clients.privacy.draws import Draws
from fedloom.clients.privacy.secure_aggregation.contribution import bounded, masked, noise_share
from fedloom.clients.privacy.secure_aggregation.opening import Ready, ready
from fedloom.clients.protocol.messages import to_arrays
from fedloom.fusion.exact import dequantise, quantise
from fedloom.fusion.state import State


@dataclass(frozen=True, eq=False)
class Protection:
    """Protects the contribution of one job by noise, masks or both. Call `begin` before training, and `protect` after it.

    Attributes:
        job: The message that the site answers, with its policy and its stores.
    """

    job: Job

    @functools.cached_property
    def cost(self) -> float:
        """The epsilon of all the site's rounds, with this one; reading it the first time charges the round."""
        return spend(self.job)

    @functools.cached_property
    def ready(self) -> Ready:
        """The checked masked round, with the other sites' shares opened."""
        return ready(self.job)

    @functools.cached_property
    def sketch_key(self) -> bytes:
        """The site's secret key for sketches; reading it the first time records the start of a masked round."""
        return self.job.memory.begin(self.job.order.run, self.job.order.round)

    @functools.cached_property
    def draws(self) -> Draws:
        """The images that the training draws."""
        return Draws()

    def begin(self) -> None:
        """Check the order and charge its cost before anything else, because a failure reveals something, too."""
        if self.job.order.secure:
            _ = self.ready, self.sketch_key
        if self.job.config.privacy.noise:
            _ = self.cost

    def protect(
        self, session: Session, records: dict[str, State], start: Mapping[str, State], steps: int
    ) -> tuple[dict[str, ArrayRecord], dict[str, float]]:
        """Return the records to send, with noise, masks or both.

        Args:
            session: The trained session.
            records: Its contribution after training, by record.
            start: Its contribution before training. Only the difference is protected and sent.
            steps: The number of training steps.

        Returns:
            The protected records, and the privacy cost as {"epsilon": ...} (empty without noise).
        """
        job, privacy, bits = self.job, self.job.config.privacy, self.job.config.federation.scale_bits
        changed = changes(job, session, start, records)
        cost = {"epsilon": self.cost} if privacy.noise else {}
        if privacy.noise:
            protected = private(changed, bits, privacy, noise_share(job, self.ready) if job.order.secure else 1.0)
        else:
            changed = bounded(job, changed, records)
            protected = changed.whole()
        if job.order.secure:
            key = b"" if job.charged else self.sketch_key
            states = masked(job, self.ready, key, protected, changed, steps, self.draws.digests())
            sent = {record: to_arrays(state) for record, state in states.items()}
        else:
            floats = {record: dequantise(state, bits) for record, state in protected.items()}
            sent = {record: to_arrays(state, job.config.federation.packed) for record, state in floats.items()}
            protected = {record: quantise(state, bits) for record, state in floats.items()}
        keep_sent(job, changed, protected)
        return sent, cost
