"""Errors that the user can solve: each message is one sentence that says what is wrong and what would work."""


class TitansError(Exception):
    """The base class of these errors; the command line prints the message and ends with `exit_code`."""

    exit_code = 2
    """2: wrong input. 1: a run that cannot go on."""
