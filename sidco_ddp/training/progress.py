"""What a person sees of a run: a bar on a terminal, otherwise a log line an epoch, and nothing where it is quiet."""

import logging
import os
import sys
from importlib.util import find_spec
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Told of every step and every epoch."""

    def step(self, loss: float) -> None:
        """One optimizer step is done."""

    def resume(self, steps: int) -> None:
        """So many steps were done before this process started."""

    def epoch(self, text: str) -> None:
        """One epoch is done and evaluated."""

    def close(self) -> None:
        """The run is over."""


class LogProgress:
    """One log line an epoch."""

    def step(self, loss: float) -> None:
        """Steps are not logged."""

    def resume(self, steps: int) -> None:
        """Nor are those before them."""

    def epoch(self, text: str) -> None:
        """Log the epoch."""
        logger.info(text)

    def close(self) -> None:
        """Nothing is open."""


class BarProgress:
    """A bar over the steps of the run, with a line above it for every epoch."""

    def __init__(self, total_steps: int) -> None:
        from tqdm import tqdm  # an extra: `make_progress` has looked whether it is there

        known = min(os.get_terminal_size(sys.stderr.fileno())) > 0
        size: dict[str, Any] = {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}  # 0 would show nothing
        self._bar: Any = tqdm(total=total_steps, unit="step", file=sys.stderr, **size)

    def step(self, loss: float) -> None:
        """Move the bar."""
        self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self._bar.update()

    def resume(self, steps: int) -> None:
        """Start the bar there."""
        self._bar.update(steps)
        self._bar.unpause()

    def epoch(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


def make_progress(total_steps: int) -> Progress:
    """A bar if stderr is a terminal and tqdm is installed, log lines otherwise."""
    terminal = sys.stderr.isatty() and logger.isEnabledFor(logging.INFO)
    return BarProgress(total_steps) if terminal and find_spec("tqdm") is not None else LogProgress()
