"""Labels of connectionist temporal classification (Graves et al., 2006): from text, to text, and the errors in it."""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from sidco_ddp.workloads.base import require_library

BLANK = 0
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ '"  # of the labels from 1 on
NUM_LABELS = 1 + len(ALPHABET)


class Errors(NamedTuple):
    """How many letters and words were read wrongly, of how many in the references."""

    character_errors: int
    characters: int
    word_errors: int
    words: int


def encode(text: str) -> Tensor:
    """The labels of a text, 1-d int64.

    Raises:
        ValueError: a character has none.
    """
    return torch.tensor([1 + ALPHABET.index(character) for character in text], dtype=torch.int64)


def frames_needed(labels: Tensor) -> int:
    """The fewest frames that can spell `labels`: one each, and a blank between two that are equal."""
    return len(labels) + int((labels[1:] == labels[:-1]).sum())


def greedy_decode(scores: Tensor, lengths: Tensor) -> list[str]:
    """The texts of the most probable label of each frame: repeats are one label, and blanks separate.

    Args:
        scores: (batch, frames, labels).
        lengths: how many of the frames count, (batch,).
    """
    texts = []
    for row, length in zip(scores.argmax(dim=-1).cpu(), lengths.tolist(), strict=True):
        labels = torch.unique_consecutive(row[:length]).tolist()
        texts.append("".join(ALPHABET[label - 1] for label in labels if label != BLANK))
    return texts


def count_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    """The edit distances from hypotheses to references, added up; no reference may be empty.

    Raises:
        DataError: jiwer, which counts them, is not installed.
    """
    jiwer = require_jiwer()
    characters = jiwer.process_characters(list(references), list(hypotheses))
    words = jiwer.process_words(list(references), list(hypotheses))
    return Errors(
        characters.substitutions + characters.deletions + characters.insertions,
        characters.hits + characters.substitutions + characters.deletions,
        words.substitutions + words.deletions + words.insertions,
        words.hits + words.substitutions + words.deletions,
    )


def require_jiwer() -> ModuleType:
    """jiwer; a `DataError` unless it is installed."""
    return require_library("jiwer", "jiwer", "counting errors of speech")
