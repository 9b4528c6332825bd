"""Trackers: send a run's metrics to TensorBoard, MLflow, Weights & Biases or CSV files. One file each."""

from fedloom.sims.tracking.base import TRACKERS
from fedloom.sims.tracking.follow import Tracking, refuse_trackers, trackable

__all__ = ["TRACKERS", "Tracking", "refuse_trackers", "trackable"]
