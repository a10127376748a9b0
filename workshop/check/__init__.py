"""Check what a program really does: probes record what its processes do, and rules judge it. Begin with ``judge.py``."""

__version__ = "0.1.0"  # of the course, and of the distribution "workshop-check"
