"""What the stage scripts import: options, launcher, models, logs, checks before a run."""
