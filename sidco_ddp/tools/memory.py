"""Memory of a step: what it keeps, and what it needs on top for the time being."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SETTLED = 6  # calls after which every scheme is past what its first ones need


class Memory(NamedTuple):
    """Bytes; None where the platform does not tell."""

    held: int | None  # kept from step to step: residual, target, the compressor's state
    scratch: int | None  # above that, at the worst moment of one step


def measure(make_step: Callable[[], Callable[[Tensor], int]], gradient: Tensor) -> Memory:
    """Memory of a step that ``make_step`` builds, seen over a call in steady state."""
    read = _Cuda(gradient.device) if gradient.is_cuda else _Process()
    if not read.works:
        return Memory(None, None)
    before = read.settle()
    step = make_step()
    for _ in range(SETTLED):
        step(gradient)
    held = read.settle()
    read.reset_peak()
    step(gradient)
    return Memory(max(held - before, 0), max(read.peak() - held, 0))


def physical(device: torch.device) -> int | None:
    """Bytes of memory that the device has; None where the platform does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


class _Cuda:
    """Torch's own books of one device."""

    works = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class _Process:
    """Resident memory of this process, on Linux."""

    def __init__(self) -> None:
        try:
            self.reset_peak()
            self.peak()
            self._trim = ctypes.CDLL(None).malloc_trim
            self.works = True
        except (OSError, StopIteration, AttributeError):
            self.works = False

    def settle(self) -> int:
        """Resident now, after freed memory went back to the system: else it would hide the next step's peak."""
        gc.collect()
        self._trim(0)
        return self._status("VmRSS")

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return self._status("VmHWM")

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
