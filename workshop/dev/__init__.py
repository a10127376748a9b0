"""For maintainers: the test suite."""
