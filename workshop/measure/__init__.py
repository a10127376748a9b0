"""Measuring and plotting: the runs' logs, memory, efficiency, pictures."""
