"""What the hook keeps beside the bucket: the residual, and scratch that does not grow with the bucket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NUMEL = 8 * 2**20
SCRATCH = 16 * 2**20  # bytes
A_SELECTED_ENTRY = 64  # bytes

HERE = Path(__file__).parent


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux' /proc")
@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("ratio", [0.001, 0.01])
def test_steady_state_keeps_one_residual(kernels, ratio):
    """Two buffers a bucket, or one temporary of the bucket's size, would be 16 MiB over the limit."""
    if kernels != "torch":
        pytest.importorskip(kernels)
    command = [sys.executable, HERE / "memory_probe.py", str(NUMEL), str(ratio), kernels]
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=True)
    extra = int(run.stdout)
    assert extra >= 3 * NUMEL, "the probe sees the residual"
    assert extra <= 4 * NUMEL + SCRATCH + A_SELECTED_ENTRY * ratio * NUMEL
