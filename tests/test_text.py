"""The language-model task: how a text is read and cut, and the perplexity that it is judged by."""

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sidco_ddp.workloads import DataError, DataSource, SettingError, Shard, make_task
from sidco_ddp.workloads.models.lstm import LanguageModel
from sidco_ddp.workloads.ptb_lstm import PtbLstm
from sidco_ddp.workloads.text import evaluation_windows, load_corpus, training_windows

TINY = {"hidden": "6", "sequence_length": "5", "dropout": "0", "batch_size": "2"}
LINES = [" ".join(f"w{(line * 7 + word * word) % 23}" for word in range(line % 6 + 1)) for line in range(120)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of 120, 40 and 30 short lines of 23 words."""
    (tmp_path / "ptb").mkdir()
    for part, count in (("train", 120), ("valid", 40), ("test", 30)):
        (tmp_path / "ptb" / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in LINES[:count]))
    return tmp_path


@pytest.fixture
def task(folder: Path) -> PtbLstm:
    return make(folder)


def make(folder: Path, **settings: str) -> PtbLstm:
    made = make_task("ptb-lstm", "small", {**TINY, **settings}, DataSource(data_dir=folder))
    assert isinstance(made, PtbLstm)
    return made


class Scores(nn.Module):
    """A model that scores the next word by the last word alone."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        assert not self.training
        return self.table[words], state


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_paper_model_has_the_papers_parameters() -> None:
    with torch.device("meta"):
        model = LanguageModel(10_000, 1500, 2, 0.65, 0.04)
    assert parameters_of(model) == 66_034_000


def test_the_task_makes_the_model_of_its_recipe() -> None:
    recipe = PtbLstm.recipes["paper"]
    assert (recipe.hidden, recipe.layers, recipe.dropout, recipe.batch_size) == (1500, 2, 0.65, 20)
    assert (recipe.lr, recipe.clip_norm, recipe.epochs, recipe.sequence_length) == (22.0, 0.25, 30, 35)
    task = make_task("ptb-lstm", settings={"hidden": "8"}, source=DataSource(synthetic=True))
    model = task.make_model()
    assert parameters_of(model) == 10_000 * 8 + 2 * (2 * 4 * 8 * 8 + 2 * 4 * 8) + 8 * 10_000 + 10_000
    assert 0.039 < max(float(parameter.detach().abs().max()) for parameter in model.parameters()) <= 0.04


def test_words_are_numbered_as_they_appear_with_an_end_to_each_line(tmp_path: Path) -> None:
    (tmp_path / "ptb.train.txt").write_text(" a b <unk> \n\n b c \n")
    (tmp_path / "ptb.valid.txt").write_text("c d\n")
    (tmp_path / "ptb.test.txt").write_text("a\nb")  # the last line may lack its line end
    corpus = load_corpus("ptb", DataSource(data_dir=tmp_path))  # the folder itself
    assert corpus.vocabulary == 5
    assert corpus.train.tolist() == [0, 1, 2, 3, 3, 1, 4, 3]
    assert corpus.valid.tolist() == [4, 2, 3]  # d is unknown
    assert corpus.test.tolist() == [0, 3, 1, 3]


@pytest.mark.parametrize("offset", [0, 1, 7, 29])
def test_training_windows_hold_each_word_and_its_successor(offset: int) -> None:
    words = torch.arange(33)
    inputs, targets = training_windows(words, 5, offset)
    assert inputs.shape == targets.shape == (6, 5)
    assert torch.equal(targets, inputs + 1)
    assert sorted(inputs.flatten().tolist()) == list(range(30))  # 31 and 32 make no window
    assert inputs[0, 0] == offset


def test_rows_read_on_from_batch_to_batch(task: PtbLstm) -> None:
    seen = list(task.batches(seed=3, epoch=1, shard=Shard(), batch_size=4))
    assert len(seen) == task.num_train_samples // 4
    rows = torch.cat([inputs for inputs, _, _ in seen], dim=1)
    targets = torch.cat([targets for _, targets, _ in seen], dim=1)
    assert (rows[:, 1:] != targets[:, :-1]).sum() <= 1  # once, the end of the text and its beginning may meet
    assert [keep.tolist() for _, _, keep in seen] == [[0.0] * 4] + [[1.0] * 4] * (len(seen) - 1)
    every = (task.train_words.tolist() * 3)[: 3 * len(task.train_words)]
    assert any(every[start : start + 10] == rows[0, :10].tolist() for start in range(len(task.train_words)))


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 3), (3, 2)])
def test_equal_global_batches_read_equal_text(task: PtbLstm, world_size: int, batch_size: int) -> None:
    alone = list(task.batches(seed=1, epoch=2, shard=Shard(), batch_size=6))
    parts = [
        list(task.batches(seed=1, epoch=2, shard=Shard(rank, world_size), batch_size=batch_size))
        for rank in range(world_size)
    ]
    assert len(alone) > 5
    for whole, pieces in zip(alone, zip(*parts, strict=True), strict=True):
        assert all(
            torch.equal(torch.cat(tensors), w) for w, tensors in zip(whole, zip(*pieces, strict=True), strict=True)
        )


def test_the_start_follows_from_seed_and_epoch(task: PtbLstm) -> None:
    def start(seed: int, epoch: int) -> list[int]:
        inputs, _, _ = next(task.batches(seed=seed, epoch=epoch, shard=Shard(), batch_size=4))
        return [int(word) for word in inputs.flatten()]

    assert start(3, 1) == start(3, 1)
    assert start(3, 1) != start(3, 2)
    assert start(3, 1) != start(4, 1)


def test_first_skips_what_was_seen(task: PtbLstm) -> None:
    whole = list(task.batches(seed=3, epoch=1, shard=Shard(1, 2), batch_size=2))
    rest = list(task.batches(seed=3, epoch=1, shard=Shard(1, 2), batch_size=2, first=4))
    assert len(rest) == len(whole) - 4
    assert all(
        torch.equal(a, b) for left, right in zip(whole[4:], rest, strict=True) for a, b in zip(left, right, strict=True)
    )


def train(task: PtbLstm, model: nn.Module, epoch: int, first: int, last: int) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number, batch in enumerate(task.batches(seed=0, epoch=epoch, shard=Shard(), batch_size=2, first=first), first):
        if number == last:
            break
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_resumed_run_is_equal_to_the_last_bit(folder: Path) -> None:
    through, model = make(folder), make(folder).make_model()
    copy = make(folder).make_model()
    copy.load_state_dict(model.state_dict())
    losses = train(through, model, 0, 0, 8)

    before, after = make(folder), make(folder)
    assert train(before, copy, 0, 0, 5) == losses[:5]
    after.load_state_dict(before.state_dict())
    assert train(after, copy, 0, 5, 8) == losses[5:]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))


def test_without_its_state_a_resumed_run_differs(folder: Path) -> None:
    model = make(folder).make_model()
    copy = make(folder).make_model()
    copy.load_state_dict(model.state_dict())
    losses = train(make(folder), model, 0, 0, 8)
    train(make(folder), copy, 0, 0, 5)
    assert train(make(folder), copy, 0, 5, 8) != losses[5:]


def test_the_state_goes_on_within_an_epoch_and_is_zero_at_its_start(task: PtbLstm) -> None:
    model = task.make_model()
    first, second = list(task.batches(seed=0, epoch=0, shard=Shard(), batch_size=2))[:2]
    fresh = task.loss(model, first)
    carried = task.loss(model, second)
    # the same two batches as one of double length
    inputs, targets = torch.cat([first[0], second[0]], 1), torch.cat([first[1], second[1]], 1)
    scores, _ = model(inputs, model.initial_state(2))
    each = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none").view(2, 10)
    assert fresh.item() == pytest.approx(each[:, :5].mean().item())
    assert carried.item() == pytest.approx(each[:, 5:].mean().item())
    assert task.loss(model, first).item() == fresh.item()  # the next epoch begins; whatever was carried is gone
    assert not any(part.requires_grad for part in task.state_dict()["state"])


def test_evaluation_leaves_the_carried_state_alone(task: PtbLstm) -> None:
    model = task.make_model()
    task.loss(model, next(task.batches(seed=0, epoch=0, shard=Shard(), batch_size=2)))
    before = [part.clone() for part in task.state_dict()["state"]]
    task.evaluate(model, Shard())
    assert all(torch.equal(a, b) for a, b in zip(before, task.state_dict()["state"], strict=True))
    assert model.training


def test_equal_scores_have_the_perplexity_of_the_vocabulary(task: PtbLstm) -> None:
    assert task.vocabulary == 24  # with <eos>
    metrics = task.metrics(task.evaluate(Scores(torch.zeros(24, 24, dtype=torch.float64)), Shard()))
    assert metrics == {"test_perplexity": pytest.approx(24), "validation_perplexity": pytest.approx(24)}


def test_perplexity_of_a_known_bigram_model(folder: Path) -> None:
    """a is followed by a with 3/4 and by <eos> with 1/4, <eos> by a with 1/2: lines of one, two and no word."""
    (folder / "ptb" / "ptb.train.txt").write_text("a\n" * 9)
    (folder / "ptb" / "ptb.test.txt").write_text("a\na a\n")  # a e a a e: 1/4, 1/2, 3/4, 1/4
    (folder / "ptb" / "ptb.valid.txt").write_text("a\na\n")  # a e a e: 1/4, 1/2, 1/4
    model = Scores(torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64).log())
    task = make(folder)
    sums = task.evaluate(model, Shard())
    assert sums.tolist()[1::2] == [3, 4]
    assert task.metrics(sums)["validation_perplexity"] == pytest.approx(32 ** (1 / 3))
    assert task.metrics(sums)["test_perplexity"] == pytest.approx((256 / 6) ** (1 / 4))


@pytest.mark.parametrize("count", [2, 9, 11, 97, 100])
@pytest.mark.parametrize("world_size", [1, 3, 12])
def test_evaluation_predicts_every_word_but_the_first_once(count: int, world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        for inputs, targets in evaluation_windows(torch.arange(count), 4, Shard(rank, world_size)):
            counted = targets >= 0
            assert torch.equal(targets[counted], inputs[counted] + 1)
            seen += targets[counted].tolist()
    assert sorted(seen) == list(range(1, count))


@pytest.mark.parametrize("world_size", [2, 3, 12])
def test_perplexity_over_ranks_equals_that_of_one_process(task: PtbLstm, world_size: int) -> None:
    model = task.make_model().double()
    alone = task.evaluate(model, Shard())
    sums = sum(task.evaluate(model, Shard(rank, world_size)) for rank in range(world_size))
    assert isinstance(sums, Tensor)
    assert sums.tolist() == pytest.approx(alone.tolist(), rel=1e-12)
    assert sums.tolist()[1::2] == [len(task.valid_words) - 1, len(task.test_words) - 1]


def test_a_hopeless_model_has_infinite_perplexity(task: PtbLstm) -> None:
    metrics = task.metrics(torch.tensor([1e6, 1.0, math.nan, 1.0], dtype=torch.float64))
    assert metrics["validation_perplexity"] == math.inf
    assert math.isnan(metrics["test_perplexity"])


def test_samples_limit_the_texts(folder: Path) -> None:
    task = make(folder, train_samples="7", test_samples="2")
    assert task.num_train_samples == 7
    assert (len(task.valid_words), len(task.test_words)) == (11, 11)
    # 4 of 7 windows a global batch: one step, and none for 8
    assert len(list(task.batches(seed=0, epoch=0, shard=Shard(), batch_size=4))) == 1
    assert list(task.batches(seed=0, epoch=0, shard=Shard(1, 2), batch_size=4)) == []


@pytest.mark.parametrize(("corpus", "vocabulary"), [("ptb", 10_000), ("wikitext-2", 33_278)])
def test_synthetic_text_has_the_corpus_vocabulary(corpus: str, vocabulary: int) -> None:
    task = make_task("ptb-lstm", "small", {"corpus": corpus}, DataSource(synthetic=True))
    assert isinstance(task, PtbLstm)
    assert task.vocabulary == vocabulary
    assert 0 <= int(task.train_words.min()) < int(task.train_words.max()) < vocabulary
    counts = task.train_words.bincount(minlength=vocabulary)
    assert counts[0] == pytest.approx(10 * int(counts[9]), rel=0.3)  # Zipf


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"ptb\.train\.txt: has no words; expected are ptb\.train\.txt, ptb\.valid\.txt, ptb\.test\.txt, from"),
        (b" \n \n", "has no words"),
        (b"a b c d", "has no line ends, so there is no <eos>"),
        (b"\xff\xfe a\n", "is not a text in UTF-8"),
        (b"PK\0\0\n", "bytes of zero"),
        (b"a b\n", r"training text of ptb .* has 3 words, of which 6 are the least"),
        (b"w1 w2 w3\n" * 9, r"ptb\.valid\.txt: has the word 'w0', which the training text has not, nor <unk>"),
    ],
)
def test_a_broken_training_text_is_refused(folder: Path, content: bytes, message: str) -> None:
    (folder / "ptb" / "ptb.train.txt").write_bytes(content)
    if content == b"a b\n":
        for part in ("valid", "test"):
            (folder / "ptb" / f"ptb.{part}.txt").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        make(folder)
    assert "\n" not in str(raised.value)


def test_a_missing_corpus_is_refused_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no ptb/ptb\.train\.txt in it; .*simple-examples\.tgz.*--synthetic"):
        make(tmp_path)
    with pytest.raises(DataError, match=r"there is no wikitext-2/wiki\.train\.tokens in it; .*wikitext-2-v1\.zip"):
        make(tmp_path, corpus="wikitext-2")


@pytest.mark.parametrize("part", ["valid", "test"])
def test_a_half_unpacked_corpus_is_refused_with_the_missing_file(folder: Path, part: str) -> None:
    (folder / "ptb" / f"ptb.{part}.txt").unlink()
    with pytest.raises(DataError, match=rf"ptb\.{part}\.txt: cannot be read \(No such file"):
        make(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("corpus", "brown", "one of ptb, wikitext-2"),
        ("hidden", "0", "at least 1"),
        ("layers", "0", "at least 1"),
        ("sequence_length", "0", "at least 1"),
        ("dropout", "1", "below 1"),
        ("init_range", "0", "above 0"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_task("ptb-lstm", "small", {name: value}, DataSource(synthetic=True))


@pytest.mark.skipif("SIDCO_DATA" not in os.environ, reason="SIDCO_DATA names no folder with the data")
@pytest.mark.parametrize(
    ("corpus", "vocabulary", "words"),
    [("ptb", 10_000, (929_589, 73_760, 82_430)), ("wikitext-2", 33_278, (2_088_628, 217_646, 245_569))],
)
def test_the_real_corpora_have_their_published_sizes(corpus: str, vocabulary: int, words: tuple[int, ...]) -> None:
    loaded = load_corpus(corpus, dataclasses.replace(DataSource(), data_dir=Path(os.environ["SIDCO_DATA"])))
    assert loaded.vocabulary == vocabulary
    assert (len(loaded.train), len(loaded.valid), len(loaded.test)) == words
