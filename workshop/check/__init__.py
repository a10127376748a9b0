"""What a program really does: it runs with probes inside, and rules judge what they record. Begin with ``judge.py``."""
