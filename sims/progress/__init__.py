"""Show the progress of a run: lines in a terminal or a log, callbacks, memory."""
