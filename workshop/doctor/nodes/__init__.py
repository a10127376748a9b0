"""``workshop doctor --nodes``: measure the nodes of a job before the training, and name the slow ones."""
