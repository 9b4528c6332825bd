"""Files that start Ray on several machines for one run: for Slurm, for Kubernetes, and for machines with SSH."""
