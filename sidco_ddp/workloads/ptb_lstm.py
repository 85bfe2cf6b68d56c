"""Words of the Penn Treebank, or of WikiText-2, predicted one after the other by an LSTM; judged by perplexity."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sidco_ddp.workloads.base import Batch, DataError, DataSource, Shard, Task, evaluating
from sidco_ddp.workloads.models.lstm import LanguageModel, State
from sidco_ddp.workloads.recipe import Recipe
from sidco_ddp.workloads.text import (
    CORPORA,
    IGNORED,
    evaluation_windows,
    invent_corpus,
    load_corpus,
    training_windows,
)


@dataclass(frozen=True, kw_only=True)
class LanguageModelRecipe(Recipe):
    """A sample is a window of `sequence_length` words, for `train_samples` and `test_samples` as well.

    The optimizer of the "paper" scale is SGD without momentum: with 0.9, steps of up to 22 * 0.25 would add up to ten
    times that. The "small" scale, a third of the text on 200 units, takes Nesterov's momentum at a lower rate; in its
    few steps it gets further so.
    """

    corpus: str = "ptb"
    hidden: int
    layers: int = 2
    dropout: float
    init_range: float
    sequence_length: int = 35

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("corpus", self.corpus in CORPORA, f"one of {', '.join(CORPORA)}")
        for name in ("hidden", "layers", "sequence_length"):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require("dropout", 0 <= self.dropout < 1, "a number of at least 0 and below 1")
        self.require("init_range", 0 < self.init_range < math.inf, "a number above 0")


_PTB = LanguageModelRecipe(
    epochs=30,
    batch_size=20,
    lr=22.0,
    optimizer="sgd",
    momentum=0.0,
    schedule="plateau",
    decay=0.25,
    clip_norm=0.25,
    hidden=1500,
    dropout=0.65,
    init_range=0.04,
)


class PtbLstm(Task):
    """A language model over a text that is read in its order.

    Each of the `world_size * batch_size` rows of a global batch reads a stretch of its own, window by window, and the
    LSTM's state goes on from one batch to the next. An order to shuffle there is not; instead each epoch starts at
    another word, which follows from seed and epoch, and cuts the text into stretches and windows from there.
    """

    name = "ptb-lstm"
    metric_name = "test_perplexity"
    higher_is_better = False
    metric_range = (1.0, math.inf)
    watched_metric = "validation_perplexity"
    recipes: ClassVar[Mapping[str, LanguageModelRecipe]] = {
        "paper": _PTB,
        "small": replace(
            _PTB,
            epochs=3,
            batch_size=10,
            lr=4.0,
            optimizer="nesterov",
            momentum=0.9,
            warmup_epochs=0.3,
            schedule="cosine",
            train_samples=8_600,
            hidden=200,
            dropout=0.1,
            init_range=0.1,
        ),
    }
    recipe: LanguageModelRecipe

    def __init__(self, recipe: LanguageModelRecipe, source: DataSource) -> None:
        super().__init__(recipe, source)
        corpus = invent_corpus(recipe.corpus) if source.synthetic else load_corpus(recipe.corpus, source)
        length, self.vocabulary = recipe.sequence_length, corpus.vocabulary
        self.train_words = _cut(corpus.train, length, recipe.train_samples)
        self.valid_words = _cut(corpus.valid, length, recipe.test_samples)
        self.test_words = _cut(corpus.test, length, recipe.test_samples)
        for part, words, least in (
            ("training", self.train_words, length),
            ("validation", self.valid_words, 1),
            ("test", self.test_words, 1),
        ):
            if len(words) <= least:
                raise DataError(
                    f"the {part} text of {recipe.corpus} in {str(source.data_dir)!r} has {len(words)} words, of which "
                    f"{least + 1} are the least; give a longer text, or a smaller sequence_length"
                )
        self._state: State | None = None

    @property
    def num_train_samples(self) -> int:
        """How many windows the training text has."""
        return (len(self.train_words) - 1) // self.recipe.sequence_length

    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""
        recipe = self.recipe
        return LanguageModel(self.vocabulary, recipe.hidden, recipe.layers, recipe.dropout, recipe.init_range)

    def batches(self, *, seed: int, epoch: int, shard: Shard, batch_size: int, first: int = 0) -> Iterator[Batch]:
        """Words and next words, (batch, sequence_length) each, and whether to go on from the last state: (batch,).

        Row g of all rows of the global batch reads windows g * S to (g + 1) * S, in an epoch of S steps.
        """
        length = self.recipe.sequence_length
        offset = np.random.default_rng((seed, epoch)).integers(self.num_train_samples * length)
        inputs, targets = training_windows(self.train_words, length, int(offset))
        steps = len(inputs) // (shard.world_size * batch_size)
        rows = (torch.arange(batch_size) + shard.rank * batch_size) * steps
        for step in range(first, steps):
            yield inputs[rows + step], targets[rows + step], torch.full((batch_size,), float(step > 0))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean cross-entropy of the next words; what state the LSTM ends in is kept for the next call."""
        inputs, targets, keep = batch
        scores, (hidden, cells) = model(inputs, self._carried(keep))
        self._state = (hidden.detach(), cells.detach())
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def _carried(self, keep: Tensor) -> State:
        """The last state where `keep` is 1, zeros where it is 0: multiplied, as a look at it would wait for a GPU."""
        shape = (self.recipe.layers, len(keep), self.recipe.hidden)
        if self._state is None or self._state[0].shape != shape:
            return keep.new_zeros(shape), keep.new_zeros(shape)
        hidden, cells = (part.to(keep.device) * keep[:, None] for part in self._state)
        return hidden, cells

    def evaluate(self, model: nn.Module, shard: Shard) -> Tensor:
        """The cross-entropy of this shard's part of the validation text and its words, and the same of the test text.

        All of both texts counts; the state is zero at the beginning of each of ten streams, and is carried from there.
        """
        with evaluating(model):
            sums = [*self._sum(model, self.valid_words, shard), *self._sum(model, self.test_words, shard)]
        return torch.tensor(sums, dtype=torch.float64)

    def _sum(self, model: nn.Module, words: Tensor, shard: Shard) -> tuple[float, int]:
        weight = next(model.parameters())
        state: State | None = None
        total, count = torch.zeros((), dtype=torch.float64, device=weight.device), 0
        for inputs, targets in evaluation_windows(words, self.recipe.sequence_length, shard):
            if len(inputs) == 0:
                continue
            if state is None:
                zeros = weight.new_zeros(self.recipe.layers, len(inputs), self.recipe.hidden)
                state = zeros, zeros
            scores, state = model(inputs.to(weight.device), state)
            each = F.cross_entropy(scores.flatten(0, 1), targets.flatten().to(weight.device), reduction="none")
            total += each.double().sum()
            count += int((targets != IGNORED).sum())
        return float(total), count

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The perplexities of the validation and of the test text."""
        valid, valid_words, test, test_words = sums.tolist()
        return {"test_perplexity": _exp(test / test_words), "validation_perplexity": _exp(valid / valid_words)}

    def state_dict(self) -> dict[str, Any]:
        """The state that the LSTM goes on from, of this shard's rows."""
        return {"state": None if self._state is None else tuple(part.cpu() for part in self._state)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._state = saved["state"]


def _cut(words: Tensor, length: int, samples: int | None) -> Tensor:
    """The first `samples` windows of a text, and the word after them."""
    return words if samples is None else words[: samples * length + 1]


def _exp(value: float) -> float:
    """The exponential, or infinity where that is too large for a float."""
    return math.exp(value) if value < 700.0 else value if math.isnan(value) else math.inf
