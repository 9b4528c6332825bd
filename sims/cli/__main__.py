"""`python -m sims.cli`: the command `fedloom`, wherever its script is."""

from sims.cli.main import main

main()
