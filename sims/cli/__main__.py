"""Run the command `fedloom` as `python -m fedloom.sims.cli`."""

from fedloom.sims.cli.main import main

main()
