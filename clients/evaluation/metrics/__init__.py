"""Metrics from sums over examples: what a site reports adds up, so the union's values follow exactly."""

from fedloom.clients.evaluation.metrics.chosen import Metric, Metrics, Scores, blocks_of, metrics_of, weighted
from fedloom.clients.evaluation.metrics.sums import STATISTICS, Sums

__all__ = ["STATISTICS", "Metric", "Metrics", "Scores", "Sums", "blocks_of", "metrics_of", "weighted"]
