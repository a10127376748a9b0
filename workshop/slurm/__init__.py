"""Slurm and PBS: a practice cluster on this machine, the sites, and submitting to them."""
