"""AN4: 948 spoken addresses, numbers and spelled words to train on and 130 to test, on a recogniser of LSTM layers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sidco_ddp.workloads.base import Batch, DataError, DataSource, Shard, Task, evaluating, local_batches
from sidco_ddp.workloads.ctc import BLANK, NUM_LABELS, Errors, count_errors, greedy_decode, require_jiwer
from sidco_ddp.workloads.models.deepspeech import DeepSpeech
from sidco_ddp.workloads.recipe import Recipe
from sidco_ddp.workloads.speech import (
    FREQUENCIES,
    SAMPLE_RATE,
    collate,
    invent_utterances,
    load_an4,
    order_by_length,
)

EVALUATION_BATCH = 16
_SYNTHETIC = (240, 60)  # training and test utterances


@dataclass(frozen=True, kw_only=True)
class SpeechRecipe(Recipe):
    """`context` is how many frames the lookahead convolution looks ahead.

    Training leaves out recordings longer than `max_seconds`; the test has all. The learning rate is divided by 1.01 an
    epoch, as in the usual implementation of Deep Speech 2 (github.com/SeanNaren/deepspeech.pytorch).
    """

    hidden: int
    layers: int
    channels: int
    context: int = 20
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("hidden", 1), ("layers", 1), ("channels", 1), ("context", 0)):
            self.require(name, getattr(self, name) >= least, f"at least {least}")
        self.require("max_seconds", self.max_seconds is None or 0 < self.max_seconds < math.inf, "none, or more than 0")


_AN4 = SpeechRecipe(
    epochs=150,
    batch_size=20,
    lr=0.004,
    optimizer="nesterov",
    momentum=0.9,
    schedule="anneal",
    decay=1 / 1.01,
    clip_norm=400.0,
    hidden=1024,
    layers=5,
    channels=32,
)


class An4Lstm(Task):
    """Speech recognition, letter by letter, judged by the rate of wrong letters."""

    name = "an4-lstm"
    metric_name = "cer"
    higher_is_better = False
    metric_range = (0.0, 1.0)
    recipes: ClassVar[Mapping[str, SpeechRecipe]] = {
        "paper": _AN4,
        "small": replace(
            _AN4,
            epochs=30,
            batch_size=8,
            lr=0.1,
            warmup_epochs=1.0,
            decay=1 / 1.05,
            clip_norm=1.0,
            evaluate_every=5,
            hidden=256,
            layers=2,
            channels=8,
            max_seconds=3.5,
        ),
    }
    recipe: SpeechRecipe

    def __init__(self, recipe: SpeechRecipe, source: DataSource) -> None:
        super().__init__(recipe, source)
        require_jiwer()
        train = invent_utterances(_SYNTHETIC[0]) if source.synthetic else load_an4(source, "train")
        test = invent_utterances(_SYNTHETIC[1]) if source.synthetic else load_an4(source, "test")
        longest = math.inf if recipe.max_seconds is None else recipe.max_seconds * SAMPLE_RATE
        train = [utterance for utterance in train if len(utterance.samples) <= longest]
        self.train, self.test = train[: recipe.train_samples], test[: recipe.test_samples]
        if not self.train or not self.test:
            raise DataError(
                f"{len(self.train)} training and {len(self.test)} test recordings are left of AN4 in "
                f"{str(source.data_dir)!r}; one of each is the least; give a larger max_seconds, or all of the data"
            )

    @property
    def num_train_samples(self) -> int:
        """How many recordings there are to train on."""
        return len(self.train)

    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""
        recipe = self.recipe
        return DeepSpeech(FREQUENCIES, NUM_LABELS, recipe.hidden, recipe.layers, recipe.channels, recipe.context)

    def batches(self, *, seed: int, epoch: int, shard: Shard, batch_size: int, first: int = 0) -> Iterator[Batch]:
        """Spectrograms (batch, frequencies, frames), lengths (batch,), labels (batch, labels), their lengths (batch,).

        The recordings of a global batch are of like length, and are padded to one length on all ranks.
        """
        lengths = np.array([utterance.frames for utterance in self.train])
        size = shard.world_size * batch_size
        order = order_by_length(lengths, size, seed=seed, epoch=epoch)
        for number, part in enumerate(local_batches(len(order), shard, batch_size, first), first):
            everyone = [self.train[index] for index in order[number * size : (number + 1) * size]]
            longest = max(utterance.frames for utterance in everyone)
            labels = max(len(utterance.labels) for utterance in everyone)
            yield collate([self.train[index] for index in order[part]], longest, labels)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch of the CTC loss a label."""
        spectra, lengths, labels, label_lengths = batch
        scores, lengths = model(spectra, lengths)
        return F.ctc_loss(scores.transpose(0, 1), labels, lengths, label_lengths, blank=BLANK, zero_infinity=True)

    def evaluate(self, model: nn.Module, shard: Shard) -> Tensor:
        """Wrong characters, characters, wrong words and words in this shard's test recordings, decoded greedily."""
        mine = sorted(self.test[shard.rank :: shard.world_size], key=lambda utterance: utterance.frames)
        hypotheses = []
        with evaluating(model) as device:
            for start in range(0, len(mine), EVALUATION_BATCH):
                spectra, lengths, _, _ = collate(mine[start : start + EVALUATION_BATCH])
                hypotheses += greedy_decode(*model(spectra.to(device), lengths.to(device)))
        errors: Errors = count_errors([utterance.text for utterance in mine], hypotheses)
        return torch.tensor(errors, dtype=torch.float64)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The rates of wrong characters and of wrong words."""
        return {"cer": float(sums[0] / sums[1]), "wer": float(sums[2] / sums[3])}
