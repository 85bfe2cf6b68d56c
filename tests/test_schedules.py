"""The learning rate, the ratio and the settings of a recipe."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from sidco_ddp.training.schedules import Schedule, warmup_ratio
from sidco_ddp.workloads import Recipe, SettingError, override
from sidco_ddp.workloads.cifar10 import Cifar10Recipe

RECIPE = Recipe(epochs=4, batch_size=8, lr=2.0, optimizer="sgd", warmup_epochs=1.0)


def make_schedule(**changes: Any) -> tuple[torch.optim.Optimizer, Schedule]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    return optimizer, Schedule(optimizer, replace(RECIPE, **changes), steps_per_epoch=4, epochs=4)


def rates(steps: int, **changes: Any) -> list[float]:
    """The learning rate of each step."""
    optimizer, schedule = make_schedule(**changes)
    found = []
    for _ in range(steps):
        assert schedule.lr == optimizer.param_groups[0]["lr"]
        found.append(schedule.lr)
        schedule.step()
    return found


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "plateau", "anneal"])
def test_the_rate_climbs_linearly_over_the_warm_up(schedule: str) -> None:
    assert rates(4, schedule=schedule) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    assert rates(1, schedule="step", warmup_epochs=0.0) == [2.0]


def test_cosine_falls_to_zero() -> None:
    found = rates(17, schedule="cosine")
    assert found[4:] == sorted(found[4:], reverse=True)
    assert found[10] == pytest.approx(1.0)
    assert found[16] == pytest.approx(0.0)


def test_step_decays_at_fractions_of_the_epochs() -> None:
    found = rates(16, schedule="step", decay=0.1, decay_at=(0.5, 0.75))
    assert found[4:] == pytest.approx([2.0] * 4 + [0.2] * 4 + [0.02] * 4)


def test_anneal_decays_every_epoch() -> None:
    assert rates(13, schedule="anneal", decay=0.5)[4:] == pytest.approx([1.0] * 4 + [0.5] * 4 + [0.25])


def test_plateau_decays_when_nothing_improves() -> None:
    optimizer, schedule = make_schedule(schedule="plateau", decay=0.25, warmup_epochs=0.0)
    found = []
    for watched in (9.0, 8.0, 8.0, 7.0, float("nan")):
        schedule.end_epoch(watched)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == [2.0, 2.0, 0.5, 0.5, 0.125]


def test_where_higher_is_better_the_plateau_is_seen_the_other_way_round() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    recipe = replace(RECIPE, schedule="plateau", decay=0.5, warmup_epochs=0.0)
    schedule = Schedule(optimizer, recipe, steps_per_epoch=4, epochs=4, lower_is_better=False)
    for watched, rate in ((0.1, 2.0), (0.2, 2.0), (0.2, 1.0), (0.1, 0.5)):
        schedule.end_epoch(watched)
        assert schedule.lr == rate


def test_a_schedule_goes_on_where_it_was() -> None:
    _, schedule = make_schedule(schedule="plateau")
    for _ in range(6):
        schedule.step()
    schedule.end_epoch(3.0)
    schedule.end_epoch(3.0)
    optimizer, resumed = make_schedule(schedule="plateau")
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.lr == schedule.lr == optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_the_ratio_falls_geometrically_from_a_quarter() -> None:
    found = [warmup_ratio(0.001, epoch, 4) for epoch in range(6)]
    assert found[0] == 0.25
    assert found[4:] == [0.001, 0.001]
    assert [b / a for a, b in pairwise(found[:5])] == pytest.approx([0.004**0.25] * 4)
    assert warmup_ratio(0.5, 0, 4) == 0.5  # nothing to fall from
    assert warmup_ratio(0.01, 0, 0) == 0.01


def test_settings_are_read_as_what_they_are() -> None:
    recipe = Cifar10Recipe(epochs=4, batch_size=8, lr=2.0, optimizer="sgd", width=16)
    text = {"lr": "1e-3", "width": "8", "decay_at": "0.3,0.6", "clip_norm": "0.25", "schedule": "cosine"}
    changed = override(recipe, text)
    assert isinstance(changed, Cifar10Recipe)
    assert (changed.lr, changed.width, changed.decay_at) == (0.001, 8, (0.3, 0.6))
    assert (changed.clip_norm, changed.schedule, changed.epochs) == (0.25, "cosine", 4)
    assert override(changed, {"clip_norm": "none"}).clip_norm is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("widht", "8", r"'widht' is unknown to this task; it has epochs, .*width"),
        ("epochs", "2.5", r"epochs='2.5' is refused; give a whole number, such as 4"),
        ("epochs", "0", r"epochs=0 is refused; give at least 1"),
        ("lr", "fast", r"lr='fast' is refused; give a number"),
        ("lr", "nan", r"lr=nan is refused; give a number above 0"),
        ("clip_norm", "-1", r"clip_norm=-1.0 is refused; give none, or more than 0"),
        ("clip_norm", "x", r"clip_norm='x' is refused; give a number or none"),
        ("schedule", "linear", r"schedule='linear' is refused; give one of constant, cosine"),
        ("optimizer", "lbfgs", r"optimizer='lbfgs' is refused; give one of sgd"),
        ("decay_at", "0.5,2", r"decay_at=\(0.5, 2.0\) is refused; give fractions"),
        ("width", "0", r"width=0 is refused; give at least 1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(name: str, text: str, message: str) -> None:
    recipe = Cifar10Recipe(epochs=4, batch_size=8, lr=2.0, optimizer="sgd", width=16)
    with pytest.raises(SettingError, match=message):
        override(recipe, {name: text})


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(SettingError, match=r"momentum=0.0 is refused; give more than 0, as nesterov needs"):
        replace(RECIPE, optimizer="nesterov", momentum=0.0)
