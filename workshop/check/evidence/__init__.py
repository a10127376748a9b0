"""What a run leaves behind: typed events, written by the probes and read by the rules."""
