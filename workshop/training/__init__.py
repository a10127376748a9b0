"""Modules for the stage scripts: options, launcher, models, logs, checks before a run."""
