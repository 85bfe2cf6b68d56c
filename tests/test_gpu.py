"""What only a GPU can show: the order of streams. Ready to run; skipped visibly where there is no such machine."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from checks import Branches, batch, loss_of, wrap
from torch import nn
from world import free_port

from sidco_ddp import SIDCoState, attach, sidco_hook, transport

pytestmark = pytest.mark.gpu


@pytest.fixture
def one_gpu(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters_after(steps, rank, device, *, stream=None, synchronise=False, sleep=False):
    """Train on ``stream``; with random delays on the device; or with a full stop in every step."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(24, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 5)).to(device)
    dice = random.Random(rank)
    with torch.cuda.stream(stream):
        ddp_model = wrap(model, many_buckets=True)
        attach(ddp_model, "sidco-e", 0.01)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.02)
        for step in range(steps):
            optimizer.zero_grad()
            x = batch(rank, step).to(device)
            if sleep and dice.random() < 0.3:
                torch.cuda._sleep(5_000_000)
            loss_of(ddp_model, x).backward()
            if synchronise:
                torch.cuda.synchronize()
            optimizer.step()
    torch.cuda.synchronize()
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def test_backward_on_a_user_stream(one_gpu):
    """H18: the callback ran on another stream than the user's work, and gradients were sometimes old."""
    expected = parameters_after(50, 0, "cuda")
    assert torch.equal(parameters_after(50, 0, "cuda", stream=torch.cuda.Stream(), sleep=True), expected)


def test_a_future_made_by_hand_waits_for_its_stream():
    """H17: a future without a device carries no event, so its reader may see the old buffer."""
    buffer = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        buffer.fill_(7)
        future = transport._done(buffer)
    assert (future.wait() == 7).all()


def _two_gpus(rank, port):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    device = f"cuda:{rank}"
    shaken = parameters_after(300, rank, device, sleep=True)
    calm = parameters_after(300, rank, device, synchronise=True)
    assert torch.equal(shaken, calm), "H6: results depend on the order of streams"

    other = dist.new_group([0, 1])
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24))).to(device)
    ddp_model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    ddp_model.register_comm_hook(SIDCoState(ratio=0.05), sidco_hook)
    dice = random.Random(rank)
    for step in range(200):
        if dice.random() < 0.2:
            torch.cuda._sleep(2_000_000)
        work = dist.all_reduce(torch.ones(8, device=device), group=other, async_op=True)
        loss_of(ddp_model, batch(rank, step).to(device)).backward()
        work.wait()

    with_join = wrap(Branches().to(device))
    attach(with_join, ratio=0.1)
    with with_join.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * rank):
            loss_of(with_join, batch(rank, step).to(device)).backward()
    dist.destroy_process_group()


def test_two_gpus():
    """H6, H20, H21: chains of futures against busy streams; other groups and SyncBatchNorm; ``join`` with NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    mp.spawn(_two_gpus, args=(free_port(),), nprocs=2)
