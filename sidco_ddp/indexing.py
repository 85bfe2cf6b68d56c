"""Looking things up in vectors of any length: CUDA's index operations refuse, or fault, near 2³¹ elements."""

import torch
from torch import Tensor

PIECE = 2**31 - 2**26  # elements handed to one index operation


def positions(mask: Tensor) -> Tensor:
    """Indices of the true entries, ascending."""
    if mask.numel() <= PIECE:
        return mask.nonzero().squeeze(1)
    return torch.cat([piece.nonzero().squeeze(1) + number * PIECE for number, piece in enumerate(_pieces(mask))])


def pick(values: Tensor, mask: Tensor) -> Tensor:
    """The values where ``mask`` is true."""
    if values.numel() <= PIECE:
        return values[mask]
    pieces = zip(_pieces(values), _pieces(mask), strict=True)
    return torch.cat([piece[where] for piece, where in pieces])


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest values and their indices, in no particular order."""
    if values.numel() <= PIECE:
        largest, indices = torch.topk(values, count, sorted=False)
        return largest, indices
    found = [top(piece, min(count, piece.numel())) for piece in _pieces(values)]
    candidates = torch.cat([piece for piece, _ in found])
    indices = torch.cat([where + number * PIECE for number, (_, where) in enumerate(found)])
    largest, kept = torch.topk(candidates, count, sorted=False)
    return largest, indices[kept]


def _pieces(vector: Tensor) -> list[Tensor]:
    return [vector[start : start + PIECE] for start in range(0, vector.numel(), PIECE)]
