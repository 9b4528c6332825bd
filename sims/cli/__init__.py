"""The command `fedloom`: a file per group of commands."""
