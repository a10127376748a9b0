"""``workshop tour``, and ``workshop strategies``, which compares the strategies."""
