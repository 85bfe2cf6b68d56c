import pytest
import torch

from sidco_ddp.feedback import ErrorFeedback, is_finite
from sidco_ddp.layout import BucketLayout, ParameterNames
from sidco_ddp.payload import select_above

AB = BucketLayout(("a", "b"), (2, 3))
BA = BucketLayout(("b", "a"), (3, 2))


def test_what_is_not_sent_comes_back_next_time():
    feedback = ErrorFeedback()
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    target = feedback.compensate(AB, gradient.clone())
    assert torch.equal(target, gradient)
    feedback.record(AB, select_above(target, 3.5))
    assert feedback.compensate(AB, gradient).tolist() == [2.0, 4.0, 6.0, 4.0, 5.0]


def test_residual_follows_its_parameter_into_a_reversed_bucket_of_equal_length():
    feedback = ErrorFeedback()
    feedback.record(AB, select_above(feedback.compensate(AB, torch.arange(1.0, 6.0)), 99))
    assert feedback.compensate(BA, torch.zeros(5)).tolist() == [3.0, 4.0, 5.0, 1.0, 2.0]


def test_residual_follows_its_parameter_into_buckets_of_another_size_and_number():
    feedback = ErrorFeedback()
    feedback.record(AB, select_above(feedback.compensate(AB, torch.arange(1.0, 6.0)), 99))
    b, ca = BucketLayout(("b",), (3,)), BucketLayout(("c", "a"), (1, 2))
    assert feedback.compensate(b, torch.zeros(3)).tolist() == [3.0, 4.0, 5.0]
    assert feedback.waiting == ["a"]
    assert feedback.compensate(ca, torch.zeros(3)).tolist() == [0.0, 1.0, 2.0]
    assert feedback.waiting == []
    assert sorted(feedback.state_dict()) == ["a", "b", "c"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_undo_restores_to_the_bit(dtype):
    feedback = ErrorFeedback()
    feedback.record(AB, select_above(feedback.compensate(AB, torch.rand(5, dtype=dtype)), 0.5))
    before = feedback.state_dict()
    gradient = torch.tensor([1e9, -1e-9, torch.inf, torch.nan, 1]).to(dtype)
    feedback.record(AB, select_above(feedback.compensate(AB, gradient), 99))
    feedback.undo(AB, gradient)
    assert all(torch.equal(before[name], after) for name, after in feedback.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_residual_is_float32_whatever_the_gradient(dtype):
    feedback = ErrorFeedback()
    target = feedback.compensate(AB, torch.ones(5, dtype=dtype))
    assert target.dtype == torch.float32
    feedback.record(AB, select_above(target, 99))
    assert {piece.dtype for piece in feedback.state_dict().values()} == {torch.float32}


def test_flush_moves_the_residual_and_keeps_what_a_narrow_gradient_cannot_hold():
    feedback = ErrorFeedback()
    assert not feedback.flush(AB, torch.ones(5)), "there is nothing to move"
    feedback.record(AB, select_above(feedback.compensate(AB, torch.full((5,), 1e-4)), 99))
    gradient = torch.ones(5, dtype=torch.float16)
    assert feedback.flush(AB, gradient)
    target = torch.ones(5) + 1e-4
    assert torch.equal(torch.cat(list(feedback.state_dict().values())), target - gradient.float())


def test_flush_leaves_a_target_that_is_not_finite_alone():
    feedback = ErrorFeedback()
    feedback.record(AB, select_above(feedback.compensate(AB, torch.ones(5)), 99))
    gradient = torch.tensor([1, 2, torch.inf, 4, 5])
    assert not feedback.flush(AB, gradient)
    assert gradient.tolist() == [1, 2, torch.inf, 4, 5]
    assert torch.cat(list(feedback.state_dict().values())).tolist() == [1.0] * 5


def test_state_dict_round_trip_into_another_layout():
    feedback = ErrorFeedback()
    feedback.record(AB, select_above(feedback.compensate(AB, torch.arange(1.0, 6.0)), 99))
    other = ErrorFeedback()
    other.load_state_dict(feedback.state_dict())
    assert other.compensate(BA, torch.zeros(5)).tolist() == [3.0, 4.0, 5.0, 1.0, 2.0]


def test_residual_of_another_shape_is_refused_by_name():
    feedback = ErrorFeedback()
    feedback.load_state_dict({"b": torch.zeros(4)})
    with pytest.raises(ValueError, match="residual of parameter 'b' has 4 elements, the parameter has 3"):
        feedback.compensate(AB, torch.zeros(5))


def test_disabled_keeps_nothing():
    feedback = ErrorFeedback(enabled=False)
    feedback.record(AB, select_above(feedback.compensate(AB, torch.ones(5)), 99))
    feedback.undo(AB, torch.ones(5))
    assert feedback.state_dict() == {}
    assert feedback.compensate(AB, torch.ones(5)).tolist() == [1.0] * 5


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_is_finite(bad):
    vector = torch.full((1000,), 3e38)  # whose sum overflows
    assert is_finite(vector)
    vector[777] = bad
    assert not is_finite(vector)


def test_names_must_cover_what_is_reduced():
    a, b = torch.zeros(2), torch.zeros(3)
    assert ParameterNames([("a", a), ("b", b)]).layout([b, a], [3, 2]) == BA
    with pytest.raises(ValueError, match=r"named_parameters does not name a parameter of shape \(3,\)"):
        ParameterNames([("a", a)]).layout([b], [3])
    assert ParameterNames().layout([b, a], [3, 2]).names == ("parameter.0", "parameter.1")
