"""What a measurement was made on."""

import os
import platform
from pathlib import Path

import torch

from sidco_ddp import __version__


def describe() -> dict[str, str | int | None]:
    """Versions and hardware, as plain types."""
    return {
        "sidco_ddp": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "logical_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def one_line() -> str:
    """The same for a reader."""
    found = describe()
    parts = [f"torch {found['torch']}", f"{found['cpu']}, {found['logical_cpus']} logical CPUs"]
    parts.append(f"{found['threads']} thread{'s' * (found['threads'] != 1)} used")
    return "; ".join(parts + ([str(found["cuda_device"])] if found["cuda_device"] else []))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
