"""What reaches the terminal: one summary on stdout, the log and one line about a refused request on stderr."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from torch.distributed import Store  # type: ignore[attr-defined]

from sidco_ddp.training.distributed import find_rank, leave_together
from sidco_ddp.training.errors import OptionError, RunError
from sidco_ddp.workloads import DataError

REFUSED = 2  # the exit status of a request that cannot be met, as argparse has it
FAILED = 1
_NOTE = "sidco_ddp/data_error"


@contextmanager
def kept_stdout() -> Iterator[TextIO]:
    """Keep stdout for the summary: what native libraries, or anything else, write there meanwhile goes to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(own), "w") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


def configure_logging(level: int) -> None:
    """Send the package's log, from `level` on, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("sidco_ddp")
    root.addHandler(handler)
    root.setLevel(level)


@contextmanager
def refusals(program: str, store: Store | None = None) -> Iterator[None]:
    """Turn what cannot be done into one line on stderr and exit status 2, on all ranks.

    An `OptionError`, or a `RunError` with status 1, must come up on all ranks alike. A `DataError` may meet one rank
    alone, amid training: that rank leaves a note in the `store` of the process group, and the exchange, which then
    fails on the others, is not what they report.
    """
    try:
        yield
    except (OptionError, RunError) as error:
        if _is_main():
            sys.stderr.write(f"{program}: error: {error}\n")
        leave_together()
        raise SystemExit(REFUSED if isinstance(error, OptionError) else FAILED) from None
    except DataError as error:
        if store is not None:
            store.set(_NOTE, str(error))
        sys.stderr.write(f"{program}: error: {error}\n")
        raise SystemExit(REFUSED) from None
    except Exception:
        if store is None or not _has_note(store):
            raise
        raise SystemExit(REFUSED) from None


def _has_note(store: Store) -> bool:
    try:
        return bool(store.check([_NOTE]))
    except Exception:  # the store is gone with the rank that held it
        return False


def _is_main() -> bool:
    try:
        return find_rank(os.environ)[0] == 0
    except OptionError:  # which is then what is reported: by all, as nobody knows which one they are
        return True
