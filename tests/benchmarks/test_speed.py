"""How long the kernels, a compress step and the whole hook take: ``pytest tests/benchmarks --benchmark-enable``.

Not part of the default run. Compare only rows of one run, and only as ratios to ``floor``, the one addition that error
feedback needs anyway.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from test_hook import Bucket

from sidco_ddp import SIDCoState, make_compressor, sidco_hook
from sidco_ddp.feedback import ErrorFeedback
from sidco_ddp.kernels import get_kernels
from sidco_ddp.layout import BucketLayout

NUMEL = 6_553_600
STEADY = 30  # steps after which an error-fed run is in its stride
ROUNDS = {"rounds": 15, "warmup_rounds": 2}


@pytest.fixture(params=["torch", "numba"])
def kernels(request):
    if request.param != "torch":
        pytest.importorskip(request.param)
    return request.param


@pytest.fixture(scope="module")
def gradients():
    scales = torch.rand(NUMEL).add(1e-3).pow(-0.25)
    return [torch.randn(NUMEL) * scales for _ in range(4)]


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_floor(benchmark, gradients):
    benchmark.group = "step"
    out = torch.empty(NUMEL)
    benchmark.pedantic(torch.add, gradients[:2], {"out": out}, **ROUNDS)


@pytest.mark.parametrize("share", [0.0025, 0.025, 0.25])
def test_one_pass(benchmark, gradients, kernels, share):
    benchmark.group = "pass"
    out, one_pass = torch.empty(NUMEL), get_kernels(kernels, torch.device("cpu"))
    sample = (gradients[0] + gradients[1])[:100_000].abs().sort().values
    threshold = sample[-round(share * len(sample))].item()
    benchmark.pedantic(one_pass.compensate, (*gradients[:2], threshold), {"out": out}, **ROUNDS)


@pytest.mark.parametrize("ratio", [0.001, 0.01])
@pytest.mark.parametrize("name", ["sidco-e", "sidco-p", "sidco-gp", "topk"])
def test_compress_step(benchmark, gradients, kernels, name, ratio):
    """Compensate, estimate, select, record, in an error-fed run."""
    benchmark.group = "step"
    compressor, feedback = make_compressor(name, ratio=ratio), ErrorFeedback(kernels=kernels)
    layout, memory, gradient = BucketLayout(("w",), (NUMEL,)), [compressor.init(NUMEL)], torch.empty(NUMEL)

    turn = itertools.cycle(gradients)

    def fresh():
        gradient.copy_(next(turn))

    def compress():
        payload, memory[0] = compressor.select(feedback.target(layout, gradient), memory[0])
        feedback.record(layout, payload)

    for _ in range(2 if name == "topk" else STEADY):
        fresh()
        compress()
    benchmark.pedantic(compress, setup=fresh, rounds=15)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["sidco-e", "topk", "none"])
def test_hook(benchmark, gradients, kernels, name):
    """The whole hook on one rank: the compress step, the message, and its decoding."""
    benchmark.group = "hook"
    state = SIDCoState(compressor=name, ratio=0.001, kernels=kernels)
    bucket = Bucket(torch.empty(NUMEL))

    turn = itertools.cycle(gradients)

    def fresh():
        bucket.buffer().copy_(next(turn))

    def hook():
        sidco_hook(state, bucket).wait()

    for _ in range(STEADY if name == "sidco-e" else 2):
        fresh()
        hook()
    benchmark.pedantic(hook, setup=fresh, rounds=15)
