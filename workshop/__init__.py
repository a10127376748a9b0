"""The supporting code of the course: data sets, models, the check, measurements, plots.

This file imports nothing, so ``workshop --help`` answers at once, and a script imports only what it uses.
"""
