"""Accuracy and cost of networks, measured at the server."""
