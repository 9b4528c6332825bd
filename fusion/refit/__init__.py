"""Refit the layers of a fused network: select channels, and fit layers to their targets."""
