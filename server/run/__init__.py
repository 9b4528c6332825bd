"""One run: the experiment from start to summary, its training, and the final measurements."""
