import pytest
import torch

from sidco_ddp.payload import empty, largest, select_above, take


def test_select_above_is_strict_and_signed():
    payload = select_above(torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0]), 1.0)
    assert payload.indices.tolist() == [1, 3]
    assert payload.values.tolist() == [-2.0, 3.0]


def test_ties_are_the_first_equals_in_index_order():
    payload = select_above(torch.tensor([1.0, -2.0, -1.0, 3.0, 1.0]), 1.0, ties=2)
    assert payload.indices.tolist() == [0, 1, 2, 3]
    assert payload.values.tolist() == [1.0, -2.0, -1.0, 3.0]


def test_take_sorts():
    assert take(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([2, 0])).values.tolist() == [5.0, 7.0]


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_largest_keeps_magnitudes_not_positions(count):
    """Cutting off the end, as some do, would always starve the last parameters of a bucket."""
    payload = largest(select_above(torch.tensor([1.0, -9.0, 2.0, -3.0]), 0.0), count)
    assert payload.indices.tolist() == [[], [1], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3]][min(count, 4)]


def test_empty():
    payload = empty(torch.randn(7))
    assert (payload.count, payload.numel) == (0, 7)
