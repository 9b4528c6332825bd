"""Layers of a fused network fitted anew: which channels, to what, from what inputs."""
