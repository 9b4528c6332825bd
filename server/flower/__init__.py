"""The server's side of Flower: the run's place at the SuperLink, and what nodes may send there."""
