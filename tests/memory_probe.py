"""Peak memory of the hook in steady state, in a process of its own: ``python memory_probe.py NUMEL RATIO KERNELS``."""

import ctypes
import sys

import torch
import torch.distributed as dist
from test_hook import Bucket

from sidco_ddp import SIDCoState, sidco_hook


def resident(what):
    """``VmRSS`` (now) or ``VmHWM`` (peak) in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))


def main(numel, ratio, kernels):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(3):  # libraries are loaded and compiled
        sidco_hook(SIDCoState(ratio=0.01, kernels=kernels), Bucket(torch.randn(10_000)))
    bucket = Bucket(torch.randn(numel), [torch.nn.Parameter(torch.zeros(1).expand(numel))])
    state = SIDCoState(ratio=ratio, kernels=kernels)
    before = resident("VmRSS")
    for step in range(20):
        if step == 12:
            ctypes.CDLL(None).malloc_trim(0)  # what the cold calls left with the allocator is no steady state
            with open("/proc/self/clear_refs", "w") as peak:
                peak.write("5")  # the peak starts again from what is resident
        bucket.buffer().normal_(std=0.01).add_(1e-3)
        sidco_hook(state, bucket).wait()
        assert step < 12 or state.stats()["total"]["warm"]
    print(resident("VmHWM") - before)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
