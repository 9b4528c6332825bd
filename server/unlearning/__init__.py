"""Removing sites on request: requests, certificates, and what is measured for them."""
