"""The state outside its process: copies, files, other groups, other world sizes."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from checks import Branches, batch, gradients, loss_of, mean_over_ranks, residuals, wrap
from torch.nn.parallel import DistributedDataParallel

from sidco_ddp import SIDCoState, attach, make_compressor, sidco_hook

PLAIN = (int, float, str, bool, type(None))


def only_plain(thing):
    if isinstance(thing, dict):
        return all(isinstance(key, str) and only_plain(value) for key, value in thing.items())
    if isinstance(thing, list):
        return all(map(only_plain, thing))
    return type(thing) in (*PLAIN, torch.Tensor)


def check_copies(rank, world_size, how):
    """A copy has the options and the memory, and no group: used on its own, it asks for one."""
    pair = dist.new_group([0, 1])
    if rank == 2:
        return
    ddp_model = DistributedDataParallel(Branches(), process_group=pair)
    state = SIDCoState(process_group=pair, ratio=0.1, headroom=0.5, dense_steps=1)
    ddp_model.register_comm_hook(state, sidco_hook)
    for step in range(3):
        loss_of(ddp_model, batch(rank, step)).backward()
    copied = copy.deepcopy(state) if how == "deepcopy" else pickle.loads(pickle.dumps(state))
    torch.save(state, io.BytesIO())
    assert (copied.step, copied.ratio, copied.headroom, copied.dense_steps) == (3, 0.1, 0.5, 1)
    for name, piece in residuals(state).items():
        assert torch.equal(piece, residuals(copied)[name])
    from test_hook import Bucket

    with pytest.raises(RuntimeError, match="is a copy, and a copy does not take the process group along"):
        sidco_hook(copied, Bucket(torch.randn(10)))
    other = DistributedDataParallel(ddp_model.module, process_group=pair)
    other.register_comm_hook(copied, sidco_hook)  # the group is then the module's own
    loss_of(other, batch(rank, 3)).backward()
    assert copied._binding.group is pair


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_do_not_land_on_the_default_group(worlds, how):
    """H36: a restored state came back on the default group. Fails without ``_is_copy``."""
    worlds(3).run(check_copies, how=how)


def test_a_state_may_be_built_and_pickled_before_there_is_a_group():
    """H46: frameworks build the state first, and pickle it to their workers."""
    state = SIDCoState(compressor=make_compressor("sidco-p", ratio=0.02), value_dtype=torch.bfloat16)
    copied = pickle.loads(pickle.dumps(state))
    assert copied.compressor == state.compressor
    assert copied.value_dtype == torch.bfloat16


def check_file(rank, world_size):
    ddp_model = wrap(Branches(), many_buckets=True)
    state = attach(ddp_model, "sidco-gp", 0.05)
    for step in range(6):
        loss_of(ddp_model, batch(rank, step)).backward()
    file = io.BytesIO()
    torch.save({"hook": state.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)["hook"]  # weights_only, as is the default
    assert only_plain(loaded)
    assert loaded["step"] == 6
    state.load_state_dict(loaded)
    loss_of(ddp_model, batch(rank, 6)).backward()
    assert state.step == 7


def test_the_checkpoint_holds_plain_types_only(worlds):
    """H37, H22: numpy scalars and classes of our own do not load with torch's default ``weights_only``."""
    worlds(2).run(check_file)


def check_second_hook(rank, world_size):
    ddp_model = wrap(Branches())
    state = attach(ddp_model, ratio=0.05)
    saved = state.state_dict() | {"step": 41}
    state.load_state_dict(saved)  # in place: what is registered goes on from there
    loss_of(ddp_model, batch(rank, 0)).backward()
    assert state.step == 42
    with pytest.raises(RuntimeError, match=r"takes only one; load a checkpoint into the state that is registered"):
        attach(ddp_model)


def test_loading_after_registration_takes_effect(worlds):
    """H38: the documented resume registered a second time, which DDP refuses."""
    worlds(2).run(check_second_hook)


def check_other_world_size(rank, world_size):
    """Residuals of two ranks, put together so that their mean is kept, go on in a world of one rank, and back."""
    ddp_model = wrap(Branches())
    state = attach(ddp_model, "topk", 0.05)
    for step in range(3):
        ddp_model.zero_grad()
        loss_of(ddp_model, batch(rank, step)).backward()
    mean = {name: piece.float() for name, piece in mean_over_ranks(residuals(state)).items()}
    state.load_state_dict(state.state_dict() | {"residuals": mean})
    after = mean_over_ranks(residuals(state))
    for name, piece in mean.items():
        torch.testing.assert_close(after[name], piece.double(), rtol=1e-6, atol=0)
    ddp_model.zero_grad()
    loss_of(ddp_model, batch(rank, 3)).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(ddp_model).values())


@pytest.mark.parametrize("size", [1, 2])
def test_residuals_may_be_averaged_for_another_number_of_ranks(worlds, size):
    """H13 (the state's side): the mean residual is what counts, so any set of ranks may start from it."""
    worlds(size).run(check_other_world_size)
