"""The Triton kernels against the reference of ``test_kernels``, under the interpreter (``TRITON_INTERPRET=1``)."""

import math

import torch
from test_kernels import assert_found

from sidco_ddp.kernels.triton_kernels import BLOCK, TritonKernels


def main():
    torch.manual_seed(0)
    kernels = TritonKernels()
    for numel in (1, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
        for threshold, limit in ((2.0, None), (0.0, None), (1.0, numel // 8), (math.inf, 0)):
            gradient, residual = torch.randn(numel), torch.randn(numel)
            expected, old = gradient + residual, residual.clone()
            assert_found(kernels.scan(gradient, threshold, limit), gradient, threshold, limit)
            found = kernels.compensate(gradient, residual, threshold, limit)
            assert_found(found, expected, threshold, limit)
            assert torch.equal(residual, expected)
            assert torch.equal(gradient, old)
            if found.values.numel():
                assert math.isclose(found.mean, found.values.abs().mean().item(), rel_tol=1e-5)
            for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
                narrow, out = torch.randn(numel).to(dtype), torch.empty(numel)
                found = kernels.compensate(narrow, residual, threshold, limit, out=out)
                assert torch.equal(out, narrow.float() + residual)
                assert_found(found, out, threshold, limit)
        for bad in (math.inf, -math.inf, math.nan):
            gradient[numel // 2] = bad
            assert not kernels.scan(gradient, 1.0).finite


if __name__ == "__main__":
    main()
