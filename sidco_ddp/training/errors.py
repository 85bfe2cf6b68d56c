"""What ends a run with one line instead of a traceback."""


class OptionError(ValueError):
    """Something asked for cannot be had; the message names the option, the value and the remedy."""


class RunError(RuntimeError):
    """A run that cannot go on, on all ranks alike; the message says why."""
