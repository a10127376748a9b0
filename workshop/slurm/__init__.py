"""Slurm and PBS: the practice cluster on this machine, the profiles of sites, and the submission of jobs."""
