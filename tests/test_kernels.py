"""All implementations of the one pass against a reference written in the plainest way."""

import math
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from sources import DEGENERATE, DISTRIBUTIONS
from test_threshold import assert_promise

from sidco_ddp import SIDCoState, make_compressor
from sidco_ddp.feedback import ErrorFeedback
from sidco_ddp.kernels import get_kernels
from sidco_ddp.layout import BucketLayout
from sidco_ddp.target import Target

CPU = torch.device("cpu")
SIZES = [1, 2, 15, 16, 17, 127, 128, 129, 1000, 2**17 - 1, 2**17, 2**17 + 1, 300_000]


@pytest.fixture(params=["torch", "numba"])
def kernels(request):
    if request.param != "torch":
        pytest.importorskip(request.param)
    return get_kernels(request.param, CPU)


def assert_found(found, target, threshold, limit=None):
    """``found`` is what ``target`` holds above ``threshold``."""
    indices = (target.abs() > threshold).nonzero().squeeze(1)
    assert found.finite
    if limit is not None and len(indices) > limit:
        assert found.total > limit
        assert found.indices.numel() == found.values.numel() == 0
        return
    assert found.total == len(indices)
    assert found.indices.dtype == torch.int64
    assert found.values.dtype == torch.float32
    assert torch.equal(found.indices, indices)
    assert torch.equal(found.values, target[indices])


@pytest.mark.parametrize("numel", SIZES)
def test_scan(kernels, numel):
    for name, make in (DISTRIBUTIONS | DEGENERATE).items():
        if numel > 1000 and name not in ("laplace", "zeros", "constant", "zeros-90", "denormals", "one-hot"):
            continue
        vector = make(numel)
        before = vector.clone()
        largest = vector.abs().max().item()
        for threshold in (0.0, largest / 1000, largest / 2, largest, math.inf):
            for limit in (None, numel // 8):
                assert_found(kernels.scan(vector, threshold, limit), vector, threshold, limit)
        assert torch.equal(vector, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", SIZES)
def test_compensate_beside(kernels, numel, dtype):
    gradient, residual = torch.randn(numel).to(dtype), torch.randn(numel)
    expected, out = gradient.float() + residual, torch.full((numel,), math.nan)
    kept = gradient.clone(), residual.clone()
    for threshold, limit in ((2.5, None), (0.0, None), (1.0, numel // 8), (math.inf, 0)):
        assert_found(kernels.compensate(gradient, residual, threshold, limit, out=out), expected, threshold, limit)
        assert torch.equal(out, expected)
        assert torch.equal(gradient, kept[0])
        assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("numel", SIZES)
def test_compensate_in_place_parks_the_residual_in_the_gradient(kernels, numel):
    for threshold, limit in ((2.5, None), (0.0, None), (1.0, numel // 8), (math.inf, 0)):
        gradient, residual = torch.randn(numel), torch.randn(numel)
        expected, old = gradient + residual, residual.clone()
        assert_found(kernels.compensate(gradient, residual, threshold, limit), expected, threshold, limit)
        assert torch.equal(residual, expected)
        assert torch.equal(gradient, old)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("where", [0, 130, 2**17 + 5, -1])
def test_non_finite_entries_are_seen_in_the_same_pass(kernels, where, bad):
    numel = 2**17 + 300
    for threshold, limit in ((1.0, None), (1e30, None), (math.inf, None), (0.0, 100)):
        gradient, residual = torch.randn(numel), torch.randn(numel)
        assert kernels.compensate(gradient.clone(), residual.clone(), threshold, limit).finite
        gradient[where] = bad
        assert not kernels.compensate(gradient.clone(), residual.clone(), threshold, limit).finite
        assert not kernels.compensate(gradient.double(), residual, threshold, limit, out=residual.clone()).finite
        assert not kernels.scan(gradient, threshold, limit).finite
    gradient, residual = torch.full((numel,), 3e38), torch.full((numel,), 3e38)  # finite, but not their sum
    assert not kernels.compensate(gradient, residual, 1.0).finite


def test_two_threads_do_not_disturb_each_other(kernels):
    """Two models in one process: the autograd thread of each is in the pass at the same time."""
    vectors = [torch.randn(400_000) * (1 + worker) for worker in range(2)]
    residuals = [torch.randn(400_000) for _ in range(2)]
    failures = []

    def work(gradient, residual):
        try:
            for repeat in range(15):
                out = torch.empty_like(residual)
                threshold = 0.5 + repeat % 4
                found = kernels.compensate(gradient, residual, threshold, out=out)
                assert_found(found, gradient + residual, threshold)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(vectors, residuals, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_target_is_written_once_and_scanned_after(kernels):
    gradient, residual = torch.randn(5000), torch.randn(5000)
    expected, passes = gradient + residual, []

    def add(threshold, limit):
        passes.append(threshold)
        return kernels.compensate(gradient, residual, threshold, limit)

    target = Target(residual, kernels, add)
    assert (target.numel, target.device) == (5000, CPU)
    assert passes == []
    assert_found(target.above(1.0), expected, 1.0)
    assert_found(target.above(2.0), expected, 2.0)
    assert target.finite
    assert torch.equal(target.dense(), expected)
    assert passes == [1.0]


def test_target_that_nobody_scanned_is_written_when_it_is_wanted_whole(kernels):
    gradient, residual = torch.randn(50), torch.randn(50)
    expected = gradient + residual
    target = Target(residual, kernels, lambda t, limit: kernels.compensate(gradient, residual, t, limit))
    assert torch.equal(target.dense(), expected)
    assert target.finite
    assert not Target(torch.tensor([1.0, math.inf]), kernels).finite


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels must be one of auto, torch, numba, triton; got 'cuda'"):
        SIDCoState(kernels="cuda")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="kernels='triton' does not serve the device 'cpu', only cuda; kernels='auto'"):
        get_kernels("triton", CPU)


@pytest.mark.parametrize(("package", "remedy"), [("numba", r"pip install 'sidco_ddp\[fast\]'"), ("triton", "torch")])
def test_missing_package_is_named_with_its_remedy(package, remedy):
    """And ``auto`` does without."""
    code = (
        "import re, sys, torch\n"
        f"sys.modules[{package!r}] = None\n"
        "from sidco_ddp import SIDCoState\n"
        "from sidco_ddp.kernels import get_kernels\n"
        "get_kernels('auto', torch.device('cpu')).scan(torch.ones(3), 0.0)\n"
        "try:\n"
        f"    SIDCoState(kernels={package!r})\n"
        "except ValueError as error:\n"
        f"    assert re.search({f'needs the package .{package}., which is not installed: .*{remedy}'!r}, str(error))\n"
        "else:\n"
        "    raise AssertionError('not refused')\n"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100, cwd=root)


def test_kernels_that_are_installed_but_broken(monkeypatch, caplog):
    """An old numba beside a new numpy, or no writable place for its cache: ``auto`` says so and goes on without."""
    pytest.importorskip("numba")

    def broken(name):
        raise RuntimeError("no locator available")

    monkeypatch.setattr("sidco_ddp.kernels._load", broken)
    fresh = get_kernels.__wrapped__  # not what was chosen before
    assert fresh("auto", CPU).name == "torch"
    assert "the numba kernels cannot be loaded, torch's are used instead: no locator available" in caplog.text
    with pytest.raises(ValueError, match=r"kernels='numba' cannot be loaded: no locator available; pip install"):
        fresh("numba", CPU)


def test_triton_kernels_in_the_interpreter():
    """The same results from the kernels for CUDA, run by Triton's interpreter, which must be chosen before import."""
    pytest.importorskip("triton")
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, here / "triton_probe.py"], check=True, timeout=100, env=environment)


class WithMean:
    """Kernels that hand over the mean with the count, as those of an accelerator do."""

    name = "with mean"

    def scan(self, vector, threshold, limit=None):
        found = get_kernels("torch", CPU).scan(vector, threshold, limit)
        return found._replace(mean=found.values.abs().double().mean().item() if found.total else 0.0)


@pytest.mark.parametrize("source", ["laplace", "pareto-0.45", "normal", "bfloat16-steps", "zeros-90", "constant"])
def test_correction_without_host_round_trips(source):
    """What CUDA does in steady state: exactly k, the largest, and a threshold that serves the next call."""
    compressor, numel = make_compressor("sidco-e", ratio=0.01), 20_000
    state, warm = compressor.init(numel), 0
    for _ in range(20):
        vector = DISTRIBUTIONS.get(source, DEGENERATE.get(source))(numel)
        payload, state = compressor.select(Target(vector, WithMean()), state)
        assert_promise(vector, payload, 200)
        warm += state.report.warm
    assert warm >= 17 or source == "constant"


@pytest.mark.gpu
def test_one_host_sync_a_bucket_on_cuda():
    """Compensate, estimate, select and record in steady state; reading the count is the one wait."""
    feedback, layout = ErrorFeedback(), BucketLayout(("w",), (1_000_000,))
    compressor = make_compressor("sidco-e", ratio=0.001)
    state = compressor.init(1_000_000)
    for step in range(30):
        gradient = torch.randn(1_000_000, device="cuda")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as syncs:
                warnings.simplefilter("always")
                payload, state = compressor.select(feedback.target(layout, gradient), state)
                feedback.record(layout, payload)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert step < 10 or not state.report.warm or len(syncs) <= 1, [str(sync.message) for sync in syncs]
    assert state.report.warm
