"""Errors that are a person's to solve: each is one sentence that says what is wrong and what would work."""


class TitansError(Exception):
    """The base of all of them; the command line prints the sentence and ends with `exit_code`."""

    exit_code = 2
    """2: wrong input. 1: a run that cannot go on."""
