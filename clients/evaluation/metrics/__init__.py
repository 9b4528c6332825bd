"""Metrics from sums over examples: what a site reports adds up, so the union's values follow exactly."""

from fedloom.clients.evaluation.metrics.chosen import Metric, Metrics, Scores, Sums, blocks_of, metrics_of

__all__ = ["Metric", "Metrics", "Scores", "Sums", "blocks_of", "metrics_of"]
