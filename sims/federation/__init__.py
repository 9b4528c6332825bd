"""A federation's machines: keys and certificates, the server's SuperLink, and a node for each site."""
