"""Check what a program really does: probes record what its processes do, and rules judge it. Begin with ``judge.py``."""
