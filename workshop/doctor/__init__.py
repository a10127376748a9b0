"""``workshop doctor``: checks of this machine, and of a machine on which a course is to begin."""
