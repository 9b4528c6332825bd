"""The report of a run: tables, curves and pages, drawn from what its folder holds."""
