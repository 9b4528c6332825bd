"""The server's side of Flower: the run's connection to the SuperLink, and the checks of messages from nodes."""
