import math

import pytest
import torch

from sidco_ddp import wire as wire_module
from sidco_ddp.payload import select_above, take
from sidco_ddp.wire import HEADER_BYTES, NONFINITE, VERSION, Header, WireFormat


def header_of(payload, flags=0):
    return Header(VERSION, flags, 0x7FFFFFFF, payload.numel, payload.count, step=2**40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("limit", [2**31 - 1, 100])
@pytest.mark.parametrize("selected", [0, 1, 7, 8])
def test_round_trip(monkeypatch, dtype, limit, selected):
    """Also with int64 indices, which really need 2³¹ elements: the limit is lowered instead."""
    monkeypatch.setattr(wire_module, "INT32_LIMIT", limit)
    vector = torch.randn(1000)
    vector[[0, -1]] = torch.tensor([50.0, -60.0])  # padding must not meet the first entry, nor cut off the last
    payload = select_above(vector, vector.abs().sort(descending=True).values[selected].item())
    wire = WireFormat(1000, capacity=8, value_dtype=dtype)
    assert wire.index_dtype == (torch.int64 if limit == 100 else torch.int32)
    sent = wire.fit(payload)
    message = wire.encode(sent, header_of(sent))
    assert message.dtype == torch.uint8
    assert message.numel() == wire.nbytes
    assert wire.nbytes % 8 == 0
    (header,) = wire.headers(message.unsqueeze(0))
    assert header == header_of(sent)
    decoded = wire.decode(message, header.num_entries)
    assert torch.equal(decoded.indices, payload.indices)
    assert torch.equal(decoded.values, payload.values.to(dtype).float())


def test_documented_bytes():
    wire = WireFormat(numel=10, capacity=3)
    payload = select_above(torch.tensor([0.0, 1.0, 0, 0, 0, 0, 0, 0, 0, -2.0]), 0.5)
    message = wire.encode(payload, Header(VERSION, NONFINITE, 5, 10, 2, 7))
    words = message[:HEADER_BYTES].view(torch.int64).tolist()
    assert words == [VERSION | NONFINITE << 8 | 5 << 32, 10, 2, 7]
    assert message[32:44].view(torch.int32).tolist() == [1, 9, 0]
    assert message[44:56].view(torch.float32).tolist() == [1.0, -2.0, 0.0]
    assert wire.nbytes == 56


@pytest.mark.parametrize(
    ("numel", "k", "headroom", "capacity"),
    [
        (1000, 1, 0.2, 2),
        (1000, 10, 0.2, 12),
        (1000, 10, 0.0, 11),
        (1000, 11, 0.2, 14),
        (10, 10, 0.2, 10),
        (1, 1, 0.2, 1),
    ],
)
def test_capacity(numel, k, headroom, capacity):
    """max(k + 1, ceil((1 + headroom) k)), and never more than there is."""
    assert WireFormat.for_count(numel, k, headroom, torch.float32).capacity == capacity


def test_fit_keeps_the_largest():
    vector = torch.tensor([1.0, 5.0, 2.0, -7.0, 3.0])
    sent = WireFormat(5, capacity=2).fit(select_above(vector, 0.0))
    assert sent.indices.tolist() == [1, 3]


def test_values_beyond_float16_are_clamped_and_read_back_as_sent():
    """What the cast cut off must be visible to the residual: sent holds what receivers will read."""
    vector = torch.tensor([1e6, -1e6, 1e-9, 0.1])
    sent = WireFormat(4, 4, torch.float16).fit(select_above(vector, 0.0))
    assert sent.values.tolist() == [65504.0, -65504.0, 0.0, pytest.approx(0.1, rel=1e-3)]
    assert sent.values.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_combine_overwrites_adds_in_float32_and_scales_once(dtype):
    wire = WireFormat(6, capacity=3)
    vectors = [torch.tensor([3.0, 0, 0, 0, 0, 1e-3]), torch.tensor([6.0, 0, -9.0, 0, 0, 1e-3]), torch.zeros(6)]
    payloads = [select_above(vector, 0.0) for vector in vectors]
    table = torch.stack([wire.encode(payload, header_of(payload)) for payload in payloads])
    out = torch.full((6,), math.nan, dtype=dtype)
    wire.combine(table, wire.headers(table), out, 1 / len(table))
    torch.testing.assert_close(out.float(), sum(vectors) / 3, rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0)


def test_combine_of_half_precision_neither_overflows_nor_underflows():
    """Summing first would overflow float16 on the large entries, dividing first would lose the small ones."""
    wire = WireFormat(2, capacity=2)
    vector = torch.tensor([6e4, 3e-7])
    payload = select_above(vector, 0.0)
    table = torch.stack([wire.encode(payload, header_of(payload))] * 4)
    out = torch.empty(2, dtype=torch.float16)
    wire.combine(table, wire.headers(table), out, 1 / len(table))
    assert torch.equal(out, vector.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shared_indices_do_not_travel(dtype):
    """Header and k values, no room for more, and every reader puts in the indices that it selected itself."""
    vector = torch.tensor([0.0, 3.0, 0.0, -1.0, 0.5, 9.0])
    indices = torch.tensor([1, 2, 3])
    wire = WireFormat.for_count(6, 3, 0.2, dtype, with_indices=False)
    assert wire.capacity == 3
    assert wire.nbytes == 32 + (16 if dtype == torch.float32 else 8)
    message = wire.encode(wire.fit(take(vector, indices)), Header(VERSION, 0, 5, 6, 3, 7, draw=0xFFFF))
    assert message[HEADER_BYTES : HEADER_BYTES + 3 * dtype.itemsize].view(dtype).tolist() == [3.0, 0.0, -1.0]
    table = torch.stack([message, message])
    headers = wire.headers(table)
    assert headers[1] == Header(VERSION, 0, 5, 6, 3, 7, draw=0xFFFF)
    out = torch.full((6,), math.nan)
    wire.combine(table, headers, out, 1 / len(table), shared=indices)
    assert out.tolist() == [0.0, 3.0, 0.0, -1.0, 0.0, 0.0]


def test_formats_with_and_without_indices_are_told_apart():
    """The ranks compare this checksum before their first message."""
    assert WireFormat(6, 3).checksum() != WireFormat(6, 3, with_indices=False).checksum()
