"""``workshop diagnose``: say why a distributed program hangs, and name the rank, the call and the line."""
