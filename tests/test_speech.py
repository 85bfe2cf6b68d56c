"""The speech task: how recordings are read and dealt out, how labels become text, and the errors that are counted."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sidco_ddp.workloads import DataError, DataSource, SettingError, Shard, make_task
from sidco_ddp.workloads.an4_lstm import An4Lstm
from sidco_ddp.workloads.ctc import ALPHABET, NUM_LABELS, count_errors, encode, frames_needed, greedy_decode
from sidco_ddp.workloads.models.deepspeech import DeepSpeech
from sidco_ddp.workloads.speech import FREQUENCIES, collate, load_an4, order_by_length, spectrogram

TINY = {"hidden": "8", "layers": "2", "channels": "2", "context": "3"}
TEXTS = ("YES", "A B", "O'ER", "NINETY", "GO", "TWO ONE", "X")


def write_an4(folder: Path, seconds: float = 0.5) -> Path:
    """Seven recordings of growing length to train on and five to test."""
    random = np.random.default_rng(0)
    (folder / "an4" / "etc").mkdir(parents=True)
    (folder / "an4" / "wav" / "clstk").mkdir(parents=True)
    for part, count in (("train", 7), ("test", 5)):
        names, lines = [], []
        for number in range(count):
            name = f"{part}{number}"
            length = int(16_000 * seconds * (1 + 0.1 * number))
            samples = (1000 * random.standard_normal(length)).astype(">i2")
            (folder / "an4" / "wav" / "clstk" / f"{name}.raw").write_bytes(samples.tobytes())
            names.append(f"clstk/{name}")
            lines.append(f"<s> {TEXTS[number]} </s> ({name})" if part == "train" else f"{TEXTS[number]} ({name})")
        (folder / "an4" / "etc" / f"an4_{part}.fileids").write_text("\n".join(names) + "\n")
        (folder / "an4" / "etc" / f"an4_{part}.transcription").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_an4(tmp_path)


@pytest.fixture
def task(folder: Path) -> An4Lstm:
    return make(folder)


def make(folder: Path, **settings: str) -> An4Lstm:
    made = make_task("an4-lstm", "small", {"max_seconds": "none", **TINY, **settings}, DataSource(data_dir=folder))
    assert isinstance(made, An4Lstm)
    return made


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_paper_model_has_the_papers_parameters() -> None:
    with torch.device("meta"):
        model = DeepSpeech(FREQUENCIES, NUM_LABELS)
    parts = [parameters_of(part) for part in (model.conv1, model.conv2, model.lstms, model.norms, model.lookahead)]
    assert parts == [14_464, 236_576, 9_576_448 + 4 * 8_396_800, 4 * 2_048, 21_504]
    assert parameters_of(model.conv1_norm) + parameters_of(model.conv2_norm) == 128
    assert parameters_of(model.head) == 2_048 + 29_696
    assert parameters_of(model) == 43_476_256


def test_the_task_makes_the_model_of_its_recipe(task: An4Lstm) -> None:
    recipe = An4Lstm.recipes["paper"]
    assert (recipe.hidden, recipe.layers, recipe.channels, recipe.context) == (1024, 5, 32, 20)
    assert (recipe.batch_size, recipe.lr, recipe.epochs, recipe.optimizer) == (20, 0.004, 150, "nesterov")
    model = task.make_model()
    assert isinstance(model, DeepSpeech)
    assert (len(model.lstms), model.lstms[1].hidden_size, model.conv1.out_channels, model.context) == (2, 8, 2, 3)


@pytest.mark.parametrize("training", [True, False])
def test_padding_changes_nothing(training: bool) -> None:
    """Neither what comes out for the frames that count, nor the statistics of batch norm."""
    torch.manual_seed(0)
    model = DeepSpeech(FREQUENCIES, NUM_LABELS, hidden=8, layers=3, channels=2, context=3).train(training)
    lengths = torch.tensor([21, 8, 13])
    spectra = torch.randn(3, FREQUENCIES, 21)
    scores, frames = model(spectra, lengths)
    assert frames.tolist() == [11, 4, 7]
    statistics = [buffer.clone() for buffer in model.buffers()]
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.reset_running_stats()
    padded = torch.cat([spectra, torch.full((3, FREQUENCIES, 10), 1e3)], dim=2)
    padded[1, :, 8:] = 1e3
    again, _ = model(padded, lengths)
    assert again.shape == (3, 16, NUM_LABELS)
    for row, length in enumerate(frames.tolist()):
        torch.testing.assert_close(again[row, :length], scores[row, :length])
        torch.testing.assert_close(scores[row, :length].exp().sum(dim=1), torch.ones(length))
    if training:
        for before, after in zip(statistics, model.buffers(), strict=True):
            torch.testing.assert_close(after, before)


def test_the_model_looks_no_further_ahead_than_its_context() -> None:
    """5 frames in front of the convolutions, twice that and 10 after the stride, and the context of 3 frames of two."""
    model = DeepSpeech(FREQUENCIES, NUM_LABELS, hidden=8, layers=1, channels=2, context=3).eval()
    spectra = torch.randn(1, FREQUENCIES, 80)
    changed = spectra.clone()
    changed[:, :, 60:] += 1.0
    before, after = (model(x, torch.tensor([80]))[0] for x in (spectra, changed))
    differs = (before != after).any(dim=2)[0]
    # frame t of the output sees inputs up to 2 (t + 3 + 5) + 5
    assert differs.nonzero()[0].item() == 20
    assert 2 * (19 + 8) + 5 < 60 <= 2 * (20 + 8) + 5


def test_samples_are_read_with_the_higher_byte_first(folder: Path) -> None:
    path = folder / "an4" / "wav" / "clstk" / "train0.raw"
    head = b"\x00\x01\x01\x00\xff\xfe\x80\x00\x7f\xff"
    path.write_bytes(head + path.read_bytes()[len(head) :])
    first = load_an4(DataSource(data_dir=folder), "train")[0]
    assert first.samples[:5].tolist() == [1, 256, -2, -32768, 32767]
    assert first.samples.dtype == torch.int16
    assert len(first.samples) == 8000


def test_transcriptions_of_both_forms_are_read(folder: Path) -> None:
    for source in (DataSource(data_dir=folder), DataSource(data_dir=folder / "an4")):  # the folder itself as well
        assert [utterance.text for utterance in load_an4(source, "train")] == list(TEXTS)
        assert [utterance.text for utterance in load_an4(source, "test")] == list(TEXTS[:5])


def test_spectrogram_of_a_tone_has_its_frequency() -> None:
    samples = (8000 * torch.sin(torch.arange(1600) * (2 * np.pi * 1000 / 16_000))).to(torch.int16)
    spectrum = spectrogram(samples)
    assert spectrum.shape == (161, 9)
    assert set(spectrum.argmax(dim=0).tolist()) == {20}  # of bins of 50 Hz
    assert spectrum.mean().item() == pytest.approx(0, abs=1e-5)
    assert spectrum.std().item() == pytest.approx(1, abs=1e-3)


def test_silence_has_a_spectrogram() -> None:
    assert spectrogram(torch.zeros(640, dtype=torch.int16)).tolist() == torch.zeros(161, 3).tolist()


def test_labels_are_blank_letters_space_apostrophe() -> None:
    assert NUM_LABELS == 29
    assert encode("AZ 'A").tolist() == [1, 26, 27, 28, 1]
    with pytest.raises(ValueError, match="substring not found"):
        encode("a")


def test_equal_neighbours_need_a_frame_between_them() -> None:
    assert [frames_needed(encode(text)) for text in ("A", "AB", "AA", "AAA", "BOOK")] == [1, 2, 3, 5, 5]


def scores_of(path: str) -> Tensor:
    """Scores (frames, labels) that are largest for the characters of `path`, where - is the blank."""
    labels = ["-", *ALPHABET]
    return (
        nn.functional.one_hot(torch.tensor([labels.index(label) for label in path], dtype=torch.int64), NUM_LABELS)
        .float()
        .log()
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("YES", "YES"),
        ("-YY--EEES-", "YES"),
        ("BO-OK", "BOOK"),
        ("BOOK", "BOK"),
        ("A  B", "A B"),
        ("A - B", "A  B"),
        ("O'ER", "O'ER"),
        ("----", ""),
        ("", ""),
    ],
)
def test_greedy_decoding(path: str, text: str) -> None:
    scores = torch.stack([nn.functional.pad(scores_of(path), (0, 0, 0, 12 - len(path)), value=0.0)])
    scores[0, len(path) :, 5] = 9.0  # beyond the length, where nothing counts
    assert greedy_decode(scores, torch.tensor([len(path)])) == [text]


@pytest.mark.parametrize(
    ("reference", "hypothesis", "errors"),
    [
        ("YES", "YES", (0, 3, 0, 1)),
        ("YES", "", (3, 3, 1, 1)),
        ("YES", "YEAS", (1, 3, 1, 1)),
        ("TWO ONE", "TO ONE", (1, 7, 1, 2)),
        ("TWO ONE", "TWOONE", (1, 7, 2, 2)),
        ("A", "B C D", (5, 1, 3, 1)),
        ("O'ER", "OER", (1, 4, 1, 1)),
    ],
)
def test_errors_are_counted(reference: str, hypothesis: str, errors: tuple[int, int, int, int]) -> None:
    assert tuple(count_errors([reference], [hypothesis])) == errors
    assert tuple(count_errors([reference, "GO"], [hypothesis, "GO"])) == tuple(np.add(errors, (0, 2, 0, 1)))


def test_no_recordings_have_no_errors() -> None:
    assert tuple(count_errors([], [])) == (0, 0, 0, 0)


class Recited(nn.Module):
    """A model that says the same whatever it hears."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scores = nn.Parameter(scores_of(text).clamp_min(-9.0))

    def forward(self, spectra: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        assert not self.training
        return self.scores.expand(len(lengths), *self.scores.shape), torch.full_like(lengths, len(self.scores))


def test_error_rates_of_a_model_that_says_yes(task: An4Lstm) -> None:
    """To YES: none of 3, A B: 3 of 3, O'ER: 4 of 4 (or 3: O'ER has an E), NINETY: 5 of 6, GO: 3 of 2."""
    sums = task.evaluate(Recited("YES"), Shard())
    assert sums.tolist() == [0 + 3 + 3 + 5 + 3, 3 + 3 + 4 + 6 + 2, 0 + 2 + 1 + 1 + 1, 6]
    assert task.metrics(sums) == {"cer": 14 / 18, "wer": 5 / 6}


def test_a_silent_model_has_all_letters_wrong(task: An4Lstm) -> None:
    assert task.metrics(task.evaluate(Recited("---"), Shard())) == {"cer": 1.0, "wer": 1.0}


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_errors_over_ranks_equal_those_of_one_process(task: An4Lstm, world_size: int) -> None:
    model = task.make_model()
    nn.init.normal_(model.head[1].weight)  # so that it says something
    alone = task.evaluate(model, Shard())
    assert model.training
    sums = [task.evaluate(model, Shard(rank, world_size)) for rank in range(world_size)]
    assert torch.stack(sums).sum(dim=0).tolist() == alone.tolist()
    assert alone[1] == 18
    assert 0 < alone[0] != alone[1]


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), (3, 2)])
def test_equal_global_batches_hear_equal_recordings(world_size: int, batch_size: int) -> None:
    task = make_task("an4-lstm", "small", TINY, DataSource(synthetic=True))
    alone = list(task.batches(seed=1, epoch=2, shard=Shard(), batch_size=6))
    parts = [
        list(task.batches(seed=1, epoch=2, shard=Shard(rank, world_size), batch_size=batch_size))
        for rank in range(world_size)
    ]
    assert len(alone) == 40
    for whole, pieces in zip(alone, zip(*parts, strict=True), strict=True):
        assert all(map(torch.equal, whole, (torch.cat(tensors) for tensors in zip(*pieces, strict=True))))


def test_first_skips_what_was_seen(task: An4Lstm) -> None:
    whole = list(task.batches(seed=3, epoch=1, shard=Shard(1, 2), batch_size=1))
    rest = list(task.batches(seed=3, epoch=1, shard=Shard(1, 2), batch_size=1, first=2))
    assert (len(whole), len(rest)) == (3, 1)
    assert all(map(torch.equal, whole[2], rest[0]))


def test_batches_are_of_like_length_and_differ_between_epochs_and_seeds() -> None:
    lengths = np.random.default_rng(0).integers(50, 500, 103)
    order = order_by_length(lengths, 10, seed=1, epoch=2)
    assert len(set(order.tolist())) == len(order) == 100
    assert (order == order_by_length(lengths, 10, seed=1, epoch=2)).all()
    batches = lengths[order].reshape(10, 10)
    assert np.ptp(batches, axis=1).mean() < 70 < np.ptp(lengths)
    assert (np.diff(batches.min(axis=1)) < 0).any()  # the batches come in no order of length,
    assert (np.diff(batches, axis=1) < 0).any()  # nor do the recordings in a batch
    for seed, epoch in ((1, 3), (2, 2)):
        other = order_by_length(lengths, 10, seed=seed, epoch=epoch)
        assert (other != order).any()
        assert set(other.tolist()) != set(order.tolist())  # others are left out


def test_loss_falls_on_one_batch(task: An4Lstm) -> None:
    model = task.make_model()
    batch = next(task.batches(seed=0, epoch=0, shard=Shard(), batch_size=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_loss_is_the_mean_of_each_recordings_own(task: An4Lstm) -> None:
    model = task.make_model().eval()
    both = collate(task.train[1:3])
    apart = [task.loss(model, collate([utterance])).item() for utterance in task.train[1:3]]
    assert task.loss(model, both).item() == pytest.approx(sum(apart) / 2, rel=1e-5)


def test_loss_is_that_of_the_paths_that_spell_the_text(task: An4Lstm) -> None:
    """Two frames, each A with 0.5, blank with 0.3 and B with 0.2: A is spelled by A A, A blank and blank A."""

    class TwoFrames(nn.Module):
        def forward(self, spectra: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            scores = torch.full((len(lengths), 2, NUM_LABELS), -99.0)
            scores[:, :, :3] = torch.tensor([0.3, 0.5, 0.2]).log()
            return scores, torch.full_like(lengths, 2)

    loss = task.loss(TwoFrames(), (torch.zeros(1, 161, 4), torch.tensor([4]), encode("A")[None], torch.tensor([1])))
    assert loss.item() == pytest.approx(-np.log(0.25 + 2 * 0.15), rel=1e-5)


def test_training_may_leave_long_recordings_out(folder: Path) -> None:
    assert make(folder, max_seconds="0.61").num_train_samples == 3
    assert make(folder, max_seconds="0.61").metrics(torch.tensor([1.0, 2.0, 1.0, 4.0])) == {"cer": 0.5, "wer": 0.25}
    assert len(make(folder, max_seconds="0.61").test) == 5
    assert make(folder, train_samples="2", test_samples="1").num_train_samples == 2
    with pytest.raises(DataError, match=r"0 training and 5 test recordings are left .*larger max_seconds"):
        make(folder, max_seconds="0.1")


def broken(folder: Path, part: str, name: str, content: bytes | None) -> None:
    path = folder / "an4" / part / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("part", "name", "content", "message"),
    [
        ("wav", "clstk/train3.raw", None, r"train3\.raw: cannot be read \(No such file"),
        (
            "wav",
            "clstk/test4.raw",
            b"\0" * 801,
            r"test4\.raw: is cut off, 801 bytes instead of an even number from 640",
        ),
        ("wav", "clstk/train0.raw", b"", r"train0\.raw: is cut off, 0 bytes"),
        ("wav", "clstk/train0.raw", b"\0" * 638, r"train0\.raw: is cut off, 638 bytes"),
        ("wav", "clstk/train3.raw", b"\0" * 1280, r"train3\.raw: is too short, 640 samples, for its text 'NINETY'"),
        ("etc", "an4_train.transcription", None, r"an4_train\.transcription: cannot be read"),
        ("etc", "an4_test.fileids", None, r"an4_test\.fileids: cannot be read"),
        ("etc", "an4_test.fileids", b"\xff\xfe\n", r"an4_test\.fileids: cannot be read \(it is no text\)"),
        ("etc", "an4_test.transcription", b"YES (test0)\n", r"has 1 lines for the 5 recordings in an4_test\.fileids"),
        ("etc", "an4_test.transcription", b"YES (test1)\n" * 5, r"line 1: is 'YES \(test1\)' instead of .*\(test0\)"),
        ("etc", "an4_test.transcription", b"YES\n" * 5, r"line 1: is 'YES' instead of a text and \(test0\)"),
        (
            "etc",
            "an4_test.transcription",
            b"NO 5 (test0)\n" * 5,
            r"line 1: the text 'NO 5' is not of the letters A to Z",
        ),
        ("etc", "an4_test.transcription", b"(test0)\n" * 5, r"line 1: the text '' is not of the letters"),
        ("etc", "an4_train.fileids", None, r"there is no an4/etc/an4_train\.fileids in it; .*an4_raw\.bigendian"),
    ],
)
def test_broken_data_is_refused(folder: Path, part: str, name: str, content: bytes | None, message: str) -> None:
    broken(folder, part, name, content)
    with pytest.raises(DataError, match=message) as raised:
        make(folder)
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)
    assert "an4_raw.bigendian.tar.gz" in str(raised.value)


def test_a_missing_jiwer_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(DataError, match=r"needs jiwer .*pip install 'sidco_ddp\[train\]'"):
        make_task("an4-lstm", "small", {}, DataSource(synthetic=True))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("hidden", "0", "at least 1"), ("context", "-1", "at least 0"), ("max_seconds", "0", "more than 0")],
)
def test_settings_out_of_range_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_task("an4-lstm", "small", {name: value}, DataSource(synthetic=True))


@pytest.mark.skipif("SIDCO_DATA" not in os.environ, reason="SIDCO_DATA names no folder with the data")
def test_the_real_an4_is_read_whole() -> None:
    source = DataSource(data_dir=Path(os.environ.get("SIDCO_DATA", "")))
    train, test = load_an4(source, "train"), load_an4(source, "test")
    assert (len(train), len(test)) == (948, 130)
    assert test[0].text == "RUBOUT G M E F THREE NINE"
    # speech, not noise: neighbouring samples are alike
    samples = train[0].samples.double()
    assert samples.diff().std() < 0.5 * samples.std()
