"""Recorded speech: the files of AN4, the spectrogram of a recording, and utterances in batches of like length."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sidco_ddp.workloads.base import DataError, DataSource, find_folder, global_order
from sidco_ddp.workloads.ctc import ALPHABET, encode, frames_needed

SAMPLE_RATE = 16_000  # a second
WINDOW, STRIDE = 320, 160  # samples: 20 ms and 10 ms
FREQUENCIES = WINDOW // 2 + 1
_LINE = re.compile(r"(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<id>[^()]*)\)")
_REMEDY = (
    "expected are the folders etc/ and wav/ of an4_raw.bigendian.tar.gz, "
    "from http://www.speech.cs.cmu.edu/databases/an4/"
)


class Utterance(NamedTuple):
    """Samples of 16 kHz, 1-d int16, what is said in them, and the same as labels, 1-d int64."""

    samples: Tensor
    text: str
    labels: Tensor
    origin: str  # for messages

    @property
    def frames(self) -> int:
        """How many frames the spectrogram has."""
        return 1 + (len(self.samples) - WINDOW) // STRIDE


def load_an4(source: DataSource, part: str) -> list[Utterance]:
    """The utterances of a `part`, "train" or "test", in the official order.

    Raises:
        DataError: a file is missing, cut off, or no such file; the message has its path.
    """
    folder = find_folder(source, "an4", holds="etc/an4_train.fileids", remedy=_REMEDY)
    names_file, text_file = (folder / "etc" / f"an4_{part}.{kind}" for kind in ("fileids", "transcription"))
    names, lines = _read_lines(names_file), _read_lines(text_file)
    if len(names) != len(lines):
        raise DataError(
            f"{text_file}: has {len(lines)} lines for the {len(names)} recordings in {names_file.name}; {_REMEDY}"
        )
    return [
        _read_utterance(folder / "wav" / f"{name}.raw", line, f"{text_file}: line {number}")
        for number, (name, line) in enumerate(zip(names, lines, strict=True), 1)
    ]


def invent_utterances(count: int) -> list[Utterance]:
    """Noise of half a second to a second and a half, and random words."""
    random = np.random.default_rng(count)
    utterances = []
    for number in range(count):
        samples = (1000 * random.standard_normal(random.integers(SAMPLE_RATE // 2, 3 * SAMPLE_RATE // 2))).round()
        words = ["".join(random.choice(list(ALPHABET[:26]), random.integers(1, 4))) for _ in range(3)]
        text = " ".join(words)
        utterances.append(Utterance(torch.from_numpy(samples.astype(np.int16)), text, encode(text), f"noise {number}"))
    return utterances


def spectrogram(samples: Tensor) -> Tensor:
    """The logarithm of 1 plus the magnitude of each frequency, of mean 0 and variance 1: (frequencies, frames).

    The samples are taken as the whole numbers that they are: the 1 is then about the noise of rounding them.
    """
    window = torch.hamming_window(WINDOW)
    spectrum = torch.stft(samples.float(), WINDOW, STRIDE, window=window, center=False, return_complex=True)
    loudness = spectrum.abs().log1p()
    return (loudness - loudness.mean()) / (loudness.std() + 1e-5)


def collate(utterances: Sequence[Utterance], frames: int = 0, labels: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded spectrograms (batch, frequencies, frames), their lengths, padded labels (batch, labels), their lengths.

    What is padded is as long as the longest, or as `frames` and `labels` if they are more.
    """
    frames = max(frames, *(utterance.frames for utterance in utterances))
    labels = max(labels, *(len(utterance.labels) for utterance in utterances))
    spectra = torch.zeros(len(utterances), FREQUENCIES, frames)
    targets = torch.zeros(len(utterances), labels, dtype=torch.int64)
    for row, utterance in enumerate(utterances):
        spectra[row, :, : utterance.frames] = spectrogram(utterance.samples)
        targets[row, : len(utterance.labels)] = utterance.labels
    return (
        spectra,
        torch.tensor([utterance.frames for utterance in utterances]),
        targets,
        torch.tensor([len(utterance.labels) for utterance in utterances]),
    )


def order_by_length(lengths: np.ndarray, global_batch: int, *, seed: int, epoch: int) -> np.ndarray:
    """An order in which the utterances of a global batch have about equal lengths, but which are random otherwise.

    What makes no full global batch is left out, at random.
    """
    order = global_order(len(lengths), seed=seed, epoch=epoch)
    order = order[: len(order) // global_batch * global_batch]
    batches = order[np.argsort(lengths[order], kind="stable")].reshape(-1, global_batch)
    random = np.random.default_rng((seed, epoch, 1))
    return np.asarray(random.permuted(batches[random.permutation(len(batches))], axis=1).reshape(-1))


def _read_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DataError(f"{path}: cannot be read ({reason}); {_REMEDY}") from error
    return [line.strip() for line in lines if line.strip()]


def _read_utterance(path: Path, line: str, where: str) -> Utterance:
    """The recording in `path`, whose transcription is `line`, at `where`."""
    match = _LINE.fullmatch(line)
    if match is None or match["id"] != path.stem:
        raise DataError(f"{where}: is {line!r} instead of a text and ({path.stem}); {_REMEDY}")
    text = match["text"].strip()
    if not text or not set(text) <= set(ALPHABET):
        raise DataError(f"{where}: the text {text!r} is not of the letters A to Z, space and apostrophe; {_REMEDY}")
    utterance = Utterance(_read_samples(path), text, encode(text), str(path))
    if utterance.frames < 2 * frames_needed(utterance.labels) - 1:
        raise DataError(f"{path}: is too short, {len(utterance.samples)} samples, for its text {text!r}; {_REMEDY}")
    return utterance


def _read_samples(path: Path) -> Tensor:
    """Samples of 16 bits, the higher byte first."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error
    if len(content) % 2 or len(content) < 2 * WINDOW:
        raise DataError(
            f"{path}: is cut off, {len(content)} bytes instead of an even number from {2 * WINDOW} on; {_REMEDY}"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=">i2").astype(np.int16))
