"""Signals that end a run: at once while it is being set up or torn down, after the current step while it trains."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C; a launcher's or a scheduler's end; a preemption; a terminal that is closed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupt:
    """Takes the signals over. The first one counts: its number is in `requested`, and decides the exit status.

    One that was ignored before stays so.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        # nohup, and a shell's background, have some ignored, and mean it.
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self.requested else handler)

    @property
    def status(self) -> int:
        """The exit status of a run that was ended so: what a shell reports of a program that the signal ended."""
        return 128 + self.requested

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only take note of a signal: an exception amid a backward pass would leave the exchange half done."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def stop(self, number: int) -> None:
        """End the run by raising `KeyboardInterrupt`, as the signal `number`, of this rank or another, asks for."""
        self.requested = self.requested or number
        raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.requested = not self.requested, self.requested or number
        if first and not self._deferred:
            raise KeyboardInterrupt
