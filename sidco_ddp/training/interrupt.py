"""Ctrl-C: at once while the run is being set up or torn down, between two steps while it trains."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

STATUS = 128 + signal.SIGINT  # what a shell reports of a program that Ctrl-C ended


class Interrupt:
    """Takes SIGINT over. Only the first one counts, as a terminal and a launcher may both send one."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def __enter__(self) -> "Interrupt":
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.requested else self._previous)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only take note of SIGINT: an exception amid a backward pass would leave the exchange half done."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def check(self) -> None:
        """Raise the `KeyboardInterrupt` that was deferred."""
        if self.requested:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, True
        if first and not self._deferred:
            raise KeyboardInterrupt
