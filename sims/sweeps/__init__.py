"""Many runs of one experiment: other seeds, other values of its keys."""
