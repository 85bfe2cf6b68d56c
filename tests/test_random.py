"""Random combinations of model, loop, DDP mode, compressor, dtype and world size, each against a dense reference.

Every combination holds three promises: at ratio 1 the gradients are plain DDP's; at its own ratio all ranks hold the
same bits; and the sum of true gradients (of a copy without DDP, added up in float64) equals what was applied plus the
mean residual. A failure names its seed: ``check_combinations(rank, world_size, seeds=[...])`` runs that one alone.
"""

import contextlib
import copy
import random
import warnings

import pytest
import torch
from checks import assert_equal_on_all_ranks, batch, mean_over_ranks, residuals, wrap
from shapes import SHAPES

from sidco_ddp import COMPRESSORS, attach

PARTS = 7  # so that each part stays well within a test's timeout
PER_PART = {1: 12, 2: 10, 3: 8}
STEPS = 5


class Scale:
    """A loss scale that changes in the middle."""

    def __init__(self, scales):
        self.scales, self.step = scales, 0

    def get_scale(self):
        return self.scales[self.step % len(self.scales)]


def draw(seed):
    """A combination, the same on every rank."""
    pick = random.Random(seed)
    name = pick.choice(list(SHAPES))
    shape = SHAPES[name]
    unused = shape.unused or pick.random() < 0.25
    loop = pick.choice(["every step", "no_sync", "twice"])
    static = shape.steady and not unused and loop == "every step" and pick.random() < 0.25
    scales = pick.choice([None, None, [1.0], [256.0, 256.0, 64.0, 1024.0]])
    return {
        "shape": name,
        "dtype": pick.choice(shape.dtypes) if shape.dtypes else None,
        "loop": loop,
        "set_to_none": pick.random() < 0.5,
        "scales": scales,
        "ddp": {
            "find_unused_parameters": unused,
            "static_graph": static,
            "gradient_as_bucket_view": pick.random() < 0.5,
            "many_buckets": pick.random() < 0.6,
        },
        "hook": {
            "compressor": pick.choice(list(COMPRESSORS)),
            "ratio": pick.choice([0.01, 0.05, 0.3]),
            "exchange": pick.choice(["fixed", "fixed", "exact"]),
            "value_dtype": pick.choice([torch.float32, torch.float32, torch.bfloat16]),
            "dense_steps": pick.choice([0, 0, 0, 2]),
            "dense_fallback": pick.random() < 0.5,
            "headroom": pick.choice([0.0, 0.2, 1.0]),
        },
    }


def inputs(rank, step, dtype):
    x = batch(rank, step)
    return x if dtype is None else x.to(dtype)


def true_gradients(module, shape, x, rank, step):
    twin = copy.deepcopy(module)
    twin.zero_grad(set_to_none=True)
    shape.loss(twin, x, rank, step).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained(twin)}


def trained(module):
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def real(tensors):
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in tensors.items()}


def run(model, combination, rank, hook, steps=STEPS, dense_reference=False):
    """Gradients that the optimizer saw in every step, the true ones' sum in float64, the state and the sum applied."""
    shape, loop = SHAPES[combination["shape"]], combination["loop"]
    scale = Scale(combination["scales"]) if combination["scales"] and hook else None
    ddp_model = wrap(copy.deepcopy(model), **combination["ddp"])
    state = attach(ddp_model, grad_scaler=scale, **hook) if hook else None
    seen, true, applied = [], {}, {}
    for step in range(steps):
        ddp_model.zero_grad(set_to_none=combination["set_to_none"])
        factor = 1.0
        if scale is not None:
            scale.step, factor = step, scale.scales[step % len(scale.scales)]
        for micro in range(1 if loop == "every step" else 2):
            x = inputs(rank, 10 * step + micro, combination["dtype"])
            if dense_reference:
                means = mean_over_ranks(real(true_gradients(ddp_model.module, shape, x, rank, step)))
                true = {name: true.get(name, 0) + mean for name, mean in means.items()}
            with ddp_model.no_sync() if loop == "no_sync" and micro == 0 else contextlib.nullcontext():
                (shape.loss(ddp_model, x, rank, step) * factor).backward()
        found = real({n: p.grad.detach() / factor for n, p in trained(ddp_model.module) if p.grad is not None})
        assert all(gradient.isfinite().all() for gradient in found.values())
        assert_equal_on_all_ranks(found)
        seen.append(found)
        for name, gradient in found.items():
            applied[name] = applied.get(name, 0) + gradient.double()
        with torch.no_grad():
            for name, parameter in trained(ddp_model.module):
                if name in found:
                    update = torch.view_as_complex(found[name]) if parameter.is_complex() else found[name]
                    parameter.sub_(update.to(parameter.dtype), alpha=0.02)
    return seen, true, applied, state


def rounding(parameter):
    """What one addition in the parameter's dtype, and in the residual's float32, may lose."""
    dtype = torch.float32 if parameter.is_complex() else parameter.dtype
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def check_combination(rank, world_size, combination):
    torch.manual_seed(17)
    model = SHAPES[combination["shape"]].build()
    if combination["dtype"] is not None:
        model = model.to(combination["dtype"])
    coarse = 30 * max(rounding(parameter) for parameter in model.parameters())

    plain, *_ = run(model, combination, rank, None, steps=3)
    whole = combination["hook"] | {"ratio": 1.0, "value_dtype": torch.float32}
    transparent, *_ = run(model, combination, rank, whole, steps=3)
    for step, (expected, found) in enumerate(zip(plain, transparent, strict=True)):
        assert expected.keys() == found.keys(), f"step {step}: {expected.keys() ^ found.keys()}"
        largest = max(gradient.abs().max().item() for gradient in expected.values() if gradient.numel())
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=coarse, atol=coarse * largest)

    _, true, applied, state = run(model, combination, rank, combination["hook"], dense_reference=True)
    waiting = mean_over_ranks(residuals(state))
    for name, expected in true.items():
        if expected.numel() == 0:
            continue
        found = applied.get(name, torch.zeros_like(expected))
        if name in waiting:
            found = found + waiting[name].view_as(expected)
        error = (found - expected).abs().max().item()
        limit = coarse * STEPS * max(expected.abs().max().item(), 1e-6)
        assert error <= limit, f"{name}: {error:.2e} of the gradient is lost or misplaced, {limit:.2e} is rounding"


def check_combinations(rank, world_size, seeds):
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # with or without us
    for seed in seeds:
        combination = draw(seed)
        try:
            check_combination(rank, world_size, combination)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, world size {world_size}: {combination}") from error


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_random_combinations(worlds, size, part):
    start = 1000 * size + part * PER_PART[size]
    worlds(size).run(check_combinations, seeds=list(range(start, start + PER_PART[size])))
