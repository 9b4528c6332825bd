"""The command `fedloom`, with a file for each group of commands."""
