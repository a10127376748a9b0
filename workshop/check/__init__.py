"""``workshop check``: what a learner's program really does. See ``judge.py`` for the way through this folder."""
