"""The exercises of the course: what the check must know about them in addition to what it knows about any program."""
