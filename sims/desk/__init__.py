"""The operator's desk: pages and an HTTP interface to read runs and to request that sites are forgotten."""
