"""The exception for a mistake of the user."""


class UserError(Exception):
    """A mistake that one sentence explains: shown on standard error without a traceback, exit status 2."""
