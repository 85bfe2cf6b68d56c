"""The run record: a folder of its own for every run, written by the main rank."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from sidco_ddp.training.distributed import World, together
from sidco_ddp.training.errors import OptionError


class ScalarWriter(Protocol):
    """What is used of TensorBoard's writer."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add one point to a curve."""

    def close(self) -> None:
        """Write out what is pending."""


def to_json(value: Any) -> str:
    """One line of strict JSON: what is not finite becomes null, for readers other than Python refuse NaN."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class RunRecord:
    """Writes `config.json`, a line of `metrics.jsonl` a step, one of `evaluations.jsonl` an evaluation, `summary.json`,
    and TensorBoard events where tensorboard is installed, all in `folder`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(_finite(config), indent=2, allow_nan=False) + "\n")
        # Line-buffered: whatever ends the run, the file ends with a whole line.
        self._metrics = open(folder / "metrics.jsonl", "w", buffering=1)  # noqa: SIM115 (closed in close)
        self._evaluations = open(folder / "evaluations.jsonl", "w", buffering=1)  # noqa: SIM115
        self._board = _make_board(folder)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Record one optimizer step."""
        self._metrics.write(to_json(metrics) + "\n")
        self._draw(metrics, prefix="step")

    def evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Record one evaluation."""
        self._evaluations.write(to_json(metrics) + "\n")
        self._draw(metrics, prefix="evaluation")

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Record the run's summary."""
        (self.folder / "summary.json").write_text(to_json(summary) + "\n")

    def close(self) -> None:
        """Write out what is pending; nothing can be recorded after it."""
        self._metrics.close()
        self._evaluations.close()
        if self._board is not None:
            self._board.close()

    def _draw(self, metrics: Mapping[str, Any], prefix: str) -> None:
        if self._board is None:
            return
        for name, value in metrics.items():
            if name not in ("step", "epoch") and isinstance(value, int | float):
                self._board.add_scalar(f"{prefix}/{name}", value, metrics["step"])


@contextmanager
def run_record(log_dir: str, label: str, config: Mapping[str, Any], world: World) -> Iterator[RunRecord | None]:
    """The record of a run in a folder `<log_dir>/<time>-<label>` of its own, from entry to exit; None on other ranks.

    Raises:
        OptionError: on all ranks, if the main rank cannot write there.
    """

    def make() -> RunRecord | None:
        if not world.is_main:
            return None
        try:
            return RunRecord(_make_folder(Path(log_dir), f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"), config)
        except OSError as error:
            remedy = "give a folder that can"
            reason = f"{log_dir!r} cannot be written ({error.strerror or error}); {remedy}"
            raise OptionError(f"argument --log-dir: {reason}") from error

    record = together(make, world)
    try:
        yield record
    finally:
        if record is not None:
            record.close()


def _make_folder(log_dir: Path, name: str) -> Path:
    log_dir.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = log_dir / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # a run that started within the same second
            number += 1
        else:
            return folder


def _make_board(folder: Path) -> ScalarWriter | None:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter  # imports tensorboard, which may not be there

    board: ScalarWriter = SummaryWriter(str(folder))
    return board
