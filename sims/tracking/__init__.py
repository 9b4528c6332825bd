"""Trackers: what a run tells while it goes on, in the files and servers that others look at. One file each, by name."""

from fedloom.sims.tracking.base import TRACKERS
from fedloom.sims.tracking.follow import Tracking, refuse_trackers, trackable

__all__ = ["TRACKERS", "Tracking", "refuse_trackers", "trackable"]
