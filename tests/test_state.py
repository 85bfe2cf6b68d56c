"""The state's checkpoint: plain types, by name, into whatever the process looks like now."""

import io

import pytest
import torch
from checks import Branches, batch, gradients, loss_of, wrap

from sidco_ddp import SIDCoState, attach, sidco_hook


def train(ddp_model, rank, steps, start=0):
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    seen = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(ddp_model, batch(rank, step)).backward()
        seen.append(gradients(ddp_model))
        optimizer.step()
    return seen


def through_a_file(saved):
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer)  # with the default weights_only


def check_resume(rank, world_size, compressor, when, many_buckets):
    whole = wrap(Branches(), many_buckets=True)
    start = {name: piece.clone() for name, piece in whole.module.state_dict().items()}
    state = attach(whole, compressor, 0.05)
    train(whole, rank, 7)
    saved = through_a_file({"model": whole.module.state_dict(), "hook": state.state_dict()})
    expected = train(whole, rank, 7, start=7)

    ddp_model = wrap(Branches(), many_buckets=many_buckets)
    resumed = SIDCoState(compressor=compressor, ratio=0.05)
    if when == "before registration":
        resumed.load_state_dict(saved["hook"])
    ddp_model.register_comm_hook(resumed, sidco_hook)
    if when == "after the first backward":
        ddp_model.module.load_state_dict(start)
        train(ddp_model, rank, 2)
    if when != "before registration":
        resumed.load_state_dict(saved["hook"])
    ddp_model.module.load_state_dict(saved["model"])
    found = train(ddp_model, rank, 7, start=7)
    assert resumed.step == 14
    if many_buckets:
        if when != "after the first backward":
            # the first backward runs on DDP's first layout, the uninterrupted run was past it: the selection differs
            return
        for a, b in zip(expected, found, strict=True):
            for name in a:
                assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("many_buckets", [True, False])
@pytest.mark.parametrize("when", ["before registration", "after registration", "after the first backward"])
@pytest.mark.parametrize("compressor", ["sidco-e", "topk"])
def test_resume(worlds, compressor, when, many_buckets):
    worlds(2).run(check_resume, compressor=compressor, when=when, many_buckets=many_buckets)


def check_names(rank, world_size):
    ddp_model = wrap(Branches())
    state = attach(ddp_model, ratio=0.05)
    train(ddp_model, rank, 2)
    saved = state.state_dict()
    saved["residuals"]["gone.weight"] = saved["residuals"].pop("head.bias")
    with pytest.warns(UserWarning, match="residual") as seen:
        state.load_state_dict(saved)
    assert [str(warning.message) for warning in seen] == [
        "residuals without a parameter in this model are kept but not used: ['gone.weight']",
        "parameters without a residual in the checkpoint start from zero: ['head.bias']",
    ]
    train(ddp_model, rank, 1)
    assert "gone.weight" in state.state_dict()["residuals"]


def test_surplus_and_missing_names_are_warned_about(worlds):
    worlds(2).run(check_names)


def test_foreign_state_is_refused():
    with pytest.raises(ValueError, match=r"not a SIDCoState.state_dict\(\): expected the entries"):
        SIDCoState().load_state_dict({"weight": torch.zeros(3)})
    saved = SIDCoState().state_dict() | {"format": 99}
    with pytest.raises(ValueError, match="has format 99, this version reads 1"):
        SIDCoState().load_state_dict(saved)
