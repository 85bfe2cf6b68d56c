"""Starting `train.py` in processes of its own, and reading what it leaves behind."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sidco_ddp.training.distributed import find_world, process_group
from sidco_ddp.training.interrupt import Interrupt
from sidco_ddp.training.options import parse_arguments

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(*arguments: str, launcher: list[str] | None = None, **options: Any) -> "subprocess.Popen[str]":
    command = [*(launcher or [sys.executable]), str(ROOT / "train.py"), *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment(), text=True, start_new_session=True, **{**streams, **options})


def finish(process: "subprocess.Popen[str]", timeout: float = 60.0) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher and its workers: start() gave them a group of their own
        process.communicate()
        raise
    return process.returncode, out, err


def strict(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


def only_folder(log_dir: Path) -> Path:
    (folder,) = log_dir.iterdir()
    return folder


def train_module() -> ModuleType:
    """`train.py`, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_here(arguments: Sequence[str]) -> dict[str, Any]:
    """The summary of a run in this very process."""
    options = parse_arguments(arguments)
    world = find_world(options.device, options.backend)
    with process_group(world), Interrupt() as interrupt:
        summary: dict[str, Any] = train_module().run(options, world, interrupt)
    return summary
