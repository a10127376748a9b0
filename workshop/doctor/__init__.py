"""``workshop doctor``: checks for this machine, and additional checks before a course."""
