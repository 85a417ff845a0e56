"""What a user can get wrong, as one clear line and an exit code."""


class Mistake(ValueError):
    """A user's mistake in words or settings: one line that says what to do. Exit code 2."""

    exit_code = 2


class BadData(Mistake):
    """A file that is there but cannot be used: corpus, checkpoint, run folder. Exit code 3."""

    exit_code = 3
