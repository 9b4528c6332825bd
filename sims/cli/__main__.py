"""`python -m fedloom.sims.cli`: the command `fedloom`, wherever its script is."""

from fedloom.sims.cli.main import main

main()
