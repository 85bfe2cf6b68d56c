"""Text as numbered words: corpora of three files, and how a text is cut for training and for evaluation."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sidco_ddp.workloads.base import DataError, DataSource, Shard, find_folder

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
STREAMS = 10  # of an evaluation
IGNORED = -100  # a target that does not count; as in torch.nn.functional.cross_entropy


class CorpusFiles(NamedTuple):
    """Where a corpus is found, and how many words it has."""

    folder: str
    pattern: str  # of the file names, with the name of the part
    origin: str
    vocabulary: int  # words, `<eos>` among them


CORPORA = {
    "ptb": CorpusFiles(
        "ptb",
        "ptb.{}.txt",
        "the folder data/ of simple-examples.tgz, http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
        10_000,
    ),
    "wikitext-2": CorpusFiles(
        "wikitext-2",
        "wiki.{}.tokens",
        "wikitext-2-v1.zip, https://huggingface.co/datasets/Salesforce/wikitext",
        33_278,
    ),
}


class Corpus(NamedTuple):
    """Three texts as word numbers, 1-d int64 tensors."""

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: int


def load_corpus(name: str, source: DataSource) -> Corpus:
    """Read the corpus called `name`; the vocabulary is the words of the training text and `<eos>`.

    Raises:
        DataError: a file is missing, is no text in lines, or has a word that neither the training text nor `<unk>` is.
    """
    files = CORPORA[name]
    names = [files.pattern.format(part) for part in ("train", "valid", "test")]
    remedy = f"expected are {', '.join(names)}, from {files.origin}"
    folder = find_folder(source, files.folder, holds=names[0], remedy=remedy)
    texts = [_read_words(folder / name, remedy) for name in names]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(texts[0]))}
    train, valid, test = (_number(text, numbers, folder / name) for text, name in zip(texts, names, strict=True))
    return Corpus(train, valid, test, len(numbers))


def invent_corpus(name: str) -> Corpus:
    """Random words of Zipf's law, over as many as the corpus called `name` has."""
    vocabulary = CORPORA[name].vocabulary
    weights = 1.0 / np.arange(1, vocabulary + 1)
    random = np.random.default_rng(vocabulary)
    train, valid, test = (
        torch.from_numpy(random.choice(vocabulary, size, p=weights / weights.sum())) for size in (100_001, 5_001, 5_001)
    )
    return Corpus(train, valid, test, vocabulary)


def training_windows(words: Tensor, length: int, offset: int) -> tuple[Tensor, Tensor]:
    """Cut a text into windows; returns words and next words, (windows, length) each.

    The text starts at `offset` and goes on from its end to its beginning. Each word but the last is once an input, if
    they are a multiple of `length`; what is left over at the end of the text is left out.
    """
    count = (len(words) - 1) // length * length
    inputs, targets = words[:count].roll(-offset), words[1 : count + 1].roll(-offset)
    return inputs.view(-1, length), targets.view(-1, length)


def evaluation_windows(words: Tensor, length: int, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
    """This shard's part of a text: words and next words, (streams, up to `length`) each, one window after the other.

    The text is cut into ten streams of equal length or one word less, whatever the world, and a shard has every
    `world_size`-th: none, if its rank is ten or more. The last target of a stream is the first word of the next, so
    every word but the text's first is a target once. Where a stream is shorter than others, a target is `IGNORED`.
    """
    parts = np.array_split(np.arange(len(words) - 1), STREAMS)[shard.rank :: shard.world_size]
    longest = max((len(part) for part in parts), default=0)
    inputs = torch.zeros(len(parts), longest, dtype=torch.int64)
    targets = torch.full((len(parts), longest), IGNORED)
    for row, part in enumerate(parts):
        inputs[row, : len(part)], targets[row, : len(part)] = words[part], words[part + 1]
    for start in range(0, longest, length):
        yield inputs[:, start : start + length], targets[:, start : start + length]


def _read_words(path: Path, remedy: str) -> list[str]:
    """The words of a text, with an `<eos>` at the end of each line."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not a text in UTF-8 (byte {error.start}); {remedy}") from error
    if "\0" in text:
        raise DataError(f"{path}: is not a text, but has bytes of zero; {remedy}")
    if not text.strip():
        raise DataError(f"{path}: has no words; {remedy}")
    if "\n" not in text:
        raise DataError(f"{path}: has no line ends, so there is no {END_OF_LINE} in it; {remedy}")
    return [*text.removesuffix("\n").replace("\n", f" {END_OF_LINE} ").split(), END_OF_LINE]


def _number(words: list[str], numbers: dict[str, int], path: Path) -> Tensor:
    """Replace words by their numbers, and those that have none by that of `<unk>`."""
    unknown = numbers.get(UNKNOWN)
    found = [numbers.get(word, unknown) for word in words]
    if unknown is None and None in found:
        raise DataError(
            f"{path}: has the word {words[found.index(None)]!r}, which the training text has not, nor {UNKNOWN} in its "
            "place; give three texts of one corpus"
        )
    return torch.tensor(found, dtype=torch.int64)
