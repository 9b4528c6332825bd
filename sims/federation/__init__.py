"""The machines of a federation: keys and certificates, the server's SuperLink, and a node for each site."""
