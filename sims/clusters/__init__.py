"""Files that start Ray over several machines for one run: for Slurm, for Kubernetes, and for machines reached by SSH."""
