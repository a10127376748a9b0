"""Measure and plot: throughput, communication, memory and efficiency."""
