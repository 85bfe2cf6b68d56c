"""The one pass over a vector, in several implementations with the same results.

``torch`` serves every device; ``numba`` is faster on CPU; ``triton`` spares host round trips on CUDA. The last one is
not chosen by itself: its results are tested in Triton's interpreter only.
"""

import importlib.util
import logging
from functools import cache

import torch

from sidco_ddp.kernels.base import AbstractKernels, Found
from sidco_ddp.kernels.torch_kernels import TorchKernels, magnitudes_above, magnitudes_of

__all__ = [
    "KERNELS",
    "TORCH",
    "AbstractKernels",
    "Found",
    "check_kernels",
    "get_kernels",
    "magnitudes_above",
    "magnitudes_of",
]

logger = logging.getLogger(__name__)

TORCH = TorchKernels()  # for what is short, or rare
KERNELS = ("auto", "torch", "numba", "triton")
SERVES = {"numba": ("cpu",), "triton": ("cuda",)}
CHOSEN = ("numba",)  # by "auto", where it is installed and serves the device
REMEDIES = {
    "numba": "pip install 'sidco_ddp[fast]' (or numba itself)",
    "triton": "it comes with torch for CUDA; elsewhere pip install triton",
}


@cache
def get_kernels(name: str, device: torch.device) -> AbstractKernels:
    """The implementation called ``name``; ``"auto"`` is numba where it is installed and serves ``device``, else torch.

    Raises:
        ValueError: no such implementation, its package is not installed, or it does not serve the device.
    """
    check_kernels(name)
    if name in SERVES and device.type not in SERVES[name]:
        raise ValueError(
            f"kernels={name!r} does not serve the device {str(device)!r}, only {' and '.join(SERVES[name])}; "
            "kernels='auto' chooses what does"
        )
    candidates = [fast for fast in CHOSEN if device.type in SERVES[fast]] if name == "auto" else [name]
    for candidate in candidates:
        try:
            return _load(candidate)
        except (ImportError, RuntimeError) as error:  # numba raises the latter where it finds no place for its cache
            if name != "auto":
                raise ValueError(f"kernels={name!r} cannot be loaded: {error}; {REMEDIES[name]}") from error
            if _installed(candidate):
                logger.warning("the %s kernels cannot be loaded, torch's are used instead: %s", candidate, error)
    return TORCH


def check_kernels(name: str) -> str:
    """``name`` as that of an implementation which is installed.

    Raises:
        ValueError: it is not; the message says what to install.
    """
    if name not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}; got {name!r}")
    if name in REMEDIES and not _installed(name):
        raise ValueError(f"kernels={name!r} needs the package {name!r}, which is not installed: {REMEDIES[name]}")
    return name


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _load(name: str) -> AbstractKernels:
    """The implementation, imported only when it is wanted: importing numba takes a second."""
    if name == "numba":
        from sidco_ddp.kernels.numba_kernels import NumbaKernels

        return NumbaKernels()
    if name == "triton":
        from sidco_ddp.kernels.triton_kernels import TritonKernels

        return TritonKernels()
    return TORCH
