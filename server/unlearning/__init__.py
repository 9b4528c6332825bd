"""Remove sites on request: requests, certificates, and the measurements in them."""
