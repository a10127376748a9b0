"""The one exception for a user's mistake."""


class UserError(Exception):
    """A mistake that one sentence explains: shown on standard error without a traceback, exit status 2."""
