"""Tools for contributors: the tests, skeletons of new parts, and the web site."""
