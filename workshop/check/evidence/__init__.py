"""The evidence of a run: typed events that the probes write and the rules read."""
