"""``workshop diagnose``: say why a distributed program stands still, and name the rank, the call and the line."""
