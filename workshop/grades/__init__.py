"""Judge the exercises of a learner again, and report their points: ``workshop report``."""
