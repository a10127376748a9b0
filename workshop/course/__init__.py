"""The workshop's own exercises: what the check has to know about them beside what it knows of any program."""
