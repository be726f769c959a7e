"""The one exception type whose message is written for the person at the screen."""


class UserError(ValueError):
    """Bad input, told in one sentence: what, where, found, expected, what to do."""
