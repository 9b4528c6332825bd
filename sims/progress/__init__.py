"""What a user sees while something goes on: lines in a terminal or a log, callbacks, memory."""
