"""A run that is stopped at any instant goes on as if nothing had happened."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from trainruns import LAUNCHER_VARIABLES, TORCHRUN, finish, lines, only_folder, start, strict, train_here

from sidco_ddp import SIDCoState
from sidco_ddp.redistribute import redistribute, sources
from sidco_ddp.training.checkpoints.directory import Directory
from sidco_ddp.training.checkpoints.manifest import CheckpointError, Manifest, read_manifest
from sidco_ddp.training.errors import OptionError, RunError
from sidco_ddp.training.interrupt import SIGNALS, Interrupt
from sidco_ddp.training.loop import Trainer
from sidco_ddp.training.rendezvous import fresh_store
from sidco_ddp.training.replicas import check_replicas, checksums
from sidco_ddp.training.resume import random_state, set_random_state

SMALL_BUCKETS = ["--bucket-cap-mb", "0.3"]  # several, which DDP arranges anew after the first step


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def load(checkpoint: Path) -> dict[str, Any]:
    """All files of a checkpoint; what is measured in seconds is left out."""
    content = {path.name: torch.load(path, weights_only=True) for path in sorted(checkpoint.glob("*.pt"))}
    for name in content:
        if name.startswith("rank-"):
            for measured in ("seconds", "step_seconds", "evaluated_seconds"):
                del content[name]["totals"][measured]
    return content


def differences(left: Any, right: Any, at: str = "") -> list[str]:
    """Where two trees of tensors and plain types are not equal to the bit."""
    if isinstance(left, torch.Tensor):
        return [] if isinstance(right, torch.Tensor) and torch.equal(left, right) else [at]
    if isinstance(left, Mapping):
        if not isinstance(right, Mapping) or left.keys() != right.keys():
            return [at]
        return [found for name in left for found in differences(left[name], right[name], f"{at}/{name}")]
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return [at]
        pairs = enumerate(zip(left, right, strict=True))
        return [found for number, (a, b) in pairs for found in differences(a, b, f"{at}/{number}")]
    return [] if left == right else [at]


def run(*arguments: str, ranks: int = 2, launcher: Sequence[str] = (), timeout: float = 100) -> tuple[int, str, str]:
    torchrun = [str(ranks) if part == "2" else part for part in TORCHRUN]
    return finish(start(*arguments, launcher=[*torchrun, *launcher]), timeout=timeout)


# ---- a resumed run is bit-equal


@pytest.mark.parametrize(
    "compressor", ["sidco-e", *(pytest.param(c, marks=pytest.mark.slow) for c in ("topk", "none"))]
)
def test_forty_steps_are_twenty_and_twenty(tmp_path: Path, compressor: str) -> None:
    """Momentum, a schedule, several buckets, two ranks; the rest of the run is in fresh processes."""
    common = ["--compressor", compressor, "--ratio", "0.01", *SMALL_BUCKETS, "--steps", "40", "--quiet"]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    status, out, err = run(
        *common, "--checkpoint-dir", str(whole), "--checkpoint-every", "20", "--log-dir", f"{whole}l"
    )
    assert status == 0, err
    rest.mkdir()
    shutil.copytree(whole / "step-00000020", rest / "step-00000020")
    status, again, err = run(*common, "--checkpoint-dir", str(rest), "--resume", "auto", "--log-dir", f"{rest}l")
    assert status == 0, err

    at_half, at_end, resumed = (load(path) for path in (*sorted(whole.glob("step-*")), rest / "step-00000040"))
    assert differences(at_end, resumed) == []
    assert differences(at_half, at_end) != []  # the comparison sees something
    hook = at_end["rank-00000.pt"]["hook"]
    assert hook["step"] == 40
    if compressor != "none":
        assert sum(float(residual.abs().sum()) for residual in hook["residuals"].values()) > 0
    if compressor == "sidco-e":
        assert len(hook["memory"]) > 1
    logged = [
        {(step["step"], step["loss"], step["lr"], step["khat_over_k"], step["stages"]) for step in steps}
        for steps in (lines(only_folder(Path(f"{folder}l")) / "metrics.jsonl") for folder in (whole, rest))
    ]
    assert logged[1] == {step for step in logged[0] if step[0] > 20}
    assert len(logged[1]) == 20
    measured = {"seconds", "samples_per_second"}
    first, second = (
        {key: value for key, value in strict(text).items() if key not in measured} for text in (out, again)
    )
    assert first == second


def test_a_run_that_is_over_is_not_trained_again(tmp_path: Path) -> None:
    common = ["--steps", "4", "--checkpoint-dir", str(tmp_path / "saved"), "--log-dir", str(tmp_path / "logs")]
    first = train_here([*common, "--resume", "auto"])
    again = train_here([*common, "--resume", "auto"])
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    longer = train_here([*common[2:], "--resume", "auto", "--steps", "6"])
    assert longer["steps"] == 6


def test_the_random_states_come_back() -> None:
    import random

    import numpy as np

    state = random_state(torch.device("cpu"))
    first = torch.rand(3).tolist(), random.random(), np.random.rand(), random.gauss(0, 1)
    set_random_state(state, torch.device("cpu"))
    assert first == (torch.rand(3).tolist(), random.random(), np.random.rand(), random.gauss(0, 1))


# ---- another number of ranks


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 3), (3, 1), (3, 2)])
def test_the_mean_residual_is_kept(before: int, after: int) -> None:
    random = torch.Generator().manual_seed(1)
    saved = [
        {"step": 7, "residuals": {name: torch.randn(5, generator=random) for name in "ab"}, "memory": [rank]}
        for rank in range(before)
    ]
    inherited = [[saved[old] for old in sources(rank, after, before)] for rank in range(after)]
    dealt = [redistribute(states, saved[0], world_size=after, saved_world_size=before) for states in inherited]
    for name in "ab":
        mean = torch.stack([state["residuals"][name] for state in saved]).mean(dim=0)
        found = sum(state["residuals"].get(name, torch.zeros(5)) for state in dealt) / after
        assert torch.allclose(found, mean, rtol=1e-6, atol=1e-7)
    assert {state["step"] for state in dealt} == {7}


def mean_residuals(checkpoint: Path) -> dict[str, torch.Tensor]:
    states = [content["hook"]["residuals"] for name, content in load(checkpoint).items() if name.startswith("rank-")]
    shapes = {name: residual for state in states for name, residual in state.items()}
    return {
        name: sum(state.get(name, torch.zeros_like(like)) for state in states) / len(states)
        for name, like in shapes.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 3)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    common = ["--ratio", "0.01", "--batch-size", "12", "--log-dir", str(tmp_path / "logs")]
    first, second = tmp_path / "first", tmp_path / "second"
    status, _, err = run(*common, "--steps", "20", "--checkpoint-dir", str(first), ranks=before)
    assert status == 0, err
    moved = ["--resume", str(first), "--checkpoint-dir", str(second)]
    status, _, err = run(*common, "--steps", "20", *moved, ranks=after)  # nothing to train, only to save
    assert status == 0, err
    assert f"it was made by {before} ranks, there are {after} now" in err
    old, new = mean_residuals(first / "step-00000020"), mean_residuals(second / "step-00000020")
    assert old.keys() == new.keys()
    for name in old:
        assert torch.allclose(old[name], new[name], rtol=1e-5, atol=1e-7), name
    parts = load(first / "step-00000020")["shared.pt"], load(second / "step-00000020")["shared.pt"]
    assert differences(parts[0]["model"], parts[1]["model"]) == []
    totals = load(second / "step-00000020")["rank-00000.pt"]["totals"]
    steps_per_epoch = 1352 // (12 * before)
    seen = (20 % steps_per_epoch) * 12 * before  # samples of the epoch in which it stopped
    assert totals["epoch"] == 20 // steps_per_epoch
    assert 0 <= totals["batch"] * 12 * after - seen < 12 * after

    status, out, err = run(*common, "--steps", "30", *moved, ranks=after)
    assert status == 0, err
    assert strict(out)["steps"] == 30
    assert strict(out)["train_loss"] < 3


# ---- which checkpoint is taken


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 2, 4 and 6."""
    train_here(
        ["--steps", "6", "--checkpoint-every", "2", "--checkpoint-dir", str(tmp_path / "saved"), *logs(tmp_path)]
    )
    assert [path.name for path in sorted((tmp_path / "saved").glob("step-*"))] == [f"step-{n:08d}" for n in (2, 4, 6)]
    return tmp_path / "saved"


def logs(tmp_path: Path) -> list[str]:
    return ["--log-dir", str(tmp_path / "logs"), "--quiet"]


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "rank-00000.pt"
    path.write_bytes(path.read_bytes()[:-100])


def damage(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "shared.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "shared.pt").write_bytes(content)


def change(name: str, value: Any) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest[name] = {**manifest["identity"], **value} if name == "identity" else value
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    return edit


BROKEN = {
    "truncated": (truncate, r"rank-00000\.pt is not what was written: it is truncated or damaged"),
    "one bit": (damage, r"shared\.pt is not what was written: it is truncated or damaged"),
    "a file is missing": (lambda path: (path / "rank-00000.pt").unlink(), r"rank-00000\.pt is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"is no checkpoint: manifest\.json cannot be read"),
    "half a manifest": (lambda path: (path / "manifest.json").write_text('{"format": 1'), r"manifest\.json is damaged"),
    "older format": (change("format", 0), r"has format 0, this version reads 1"),
    "another task": (change("identity", {"task": "ptb-lstm"}), r"is of another run: its task is 'ptb-lstm'"),
    "another model": (change("identity", {"model": "0123"}), r"is of another run: its model is '0123'"),
    "another seed": (change("identity", {"seed": "7"}), r"is of another run: its seed is '7', this one's '0'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_passed_over_or_refused_with_the_reason(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    break_it, reason = BROKEN[case]
    break_it(saved / "step-00000006")
    with pytest.raises(OptionError, match=rf"argument --resume: .*{reason}.*; give another checkpoint, or auto"):
        train_here(["--steps", "8", "--resume", str(saved / "step-00000006"), *logs(tmp_path)])
    with caplog.at_level("INFO", logger="sidco_ddp"):
        summary = train_here(["--steps", "8", "--checkpoint-dir", str(saved), "--resume", "auto", *logs(tmp_path)])
    assert summary["steps"] == 8
    said = [record.getMessage() for record in caplog.records]
    assert any(re.search(f"passed over: .*{reason}", message) for message in said), said
    assert any(re.search(r"going on from .*step-00000004, after step 4", message) for message in said), said


def test_the_step_counts_and_not_the_clock(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.utime(saved / "step-00000002", (2**32, 2**32))
    with caplog.at_level("INFO", logger="sidco_ddp"):
        train_here(["--steps", "7", "--resume", str(saved), *logs(tmp_path)])
    assert any("step-00000006, after step 6" in record.getMessage() for record in caplog.records)


def test_a_folder_with_checkpoints_of_such_a_run_is_not_started_over(saved: Path, tmp_path: Path) -> None:
    """The new run's checkpoints would be removed as the oldest, and the old run's be taken for the latest."""
    reason = (
        r"has checkpoints of this run, the latest is step-00000006; give --resume auto to go on from it, or another"
    )
    with pytest.raises(OptionError, match=reason):
        train_here(["--steps", "2", "--checkpoint-dir", str(saved), *logs(tmp_path)])
    train_here(["--steps", "2", "--seed", "1", "--checkpoint-dir", str(saved), *logs(tmp_path)])  # of another run


def test_later_checkpoints_are_set_aside_when_a_run_goes_on_from_an_earlier_one(saved: Path, tmp_path: Path) -> None:
    earlier = ["--resume", str(saved / "step-00000002"), "--checkpoint-every", "3", "--keep", "1"]
    assert train_here(["--steps", "3", "--checkpoint-dir", str(saved), *earlier, *logs(tmp_path)])["saved"]
    assert [path.name for path in saved.glob("step-*")] == ["step-00000003"]
    aside = sorted(path.name[:19] for path in saved.glob("aside-*"))
    assert aside == ["aside-step-00000004", "aside-step-00000006"]


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    summary = train_here(
        ["--steps", "2", "--checkpoint-dir", str(tmp_path / "new"), "--resume", "auto", *logs(tmp_path)]
    )
    assert summary["steps"] == 2
    with pytest.raises(OptionError, match=r"argument --resume: .*no checkpoint: manifest.json cannot be read"):
        train_here(["--resume", str(tmp_path / "nowhere"), *logs(tmp_path)])
    with pytest.raises(OptionError, match=r"argument --resume: 'auto' looks into .*; give --checkpoint-dir DIR"):
        train_here(["--resume", "auto", *logs(tmp_path)])


# ---- what is kept, and what is refused


def manifest(step: int, **identity: str) -> Manifest:
    return Manifest(step=step, world_size=1, identity=identity, files={})


def test_the_last_ones_are_kept_and_those_of_others(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    directory.open()
    for step in (5, 10, 15):
        directory.start(step)
        directory.commit(manifest(step, task="other" if step == 5 else "own"))
    directory.start(20)  # and then the process was killed
    directory.prune(1, {"task": "own"})
    directory.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-00000005", "step-00000015"]
    assert directory.candidates() == [tmp_path / "step-00000015", tmp_path / "step-00000005"]
    assert read_manifest(tmp_path / "step-00000015") == manifest(15, task="own")


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    for _ in range(2):
        directory.start(5)
        directory.commit(manifest(5, task="a"))
    directory.start(5)
    with pytest.raises(CheckpointError, match="step-00000005 is of another run; give each run a folder of its own"):
        directory.commit(manifest(5, task="b"))
    assert read_manifest(tmp_path / "step-00000005").identity == {"task": "a"}


def test_two_runs_cannot_have_one_folder(tmp_path: Path) -> None:
    first, second = Directory(tmp_path), Directory(tmp_path)
    first.open()
    with pytest.raises(CheckpointError, match=rf"in use by another run \(process {os.getpid()} on .*folder of its own"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"--checkpoint-dir: '.*file/saved' cannot be written \(Not a directory\)"):
        train_here(["--checkpoint-dir", str(tmp_path / "file" / "saved"), *logs(tmp_path)])


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidco_ddp.training.checkpoints.directory._PATIENCE", 0.2)
    with pytest.raises(
        CheckpointError, match=r"is not the folder that the main rank has; give one that all ranks share"
    ):
        Directory(tmp_path).check_is_shared("word")
    (tmp_path / "lock").write_text("7 on elsewhere\nother\n")  # left there by an earlier run of this machine alone
    with pytest.raises(CheckpointError, match=r"is not the folder that the main rank has"):
        Directory(tmp_path).check_is_shared("word")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB: one checkpoint of the digits' model fits, two do not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]).returncode != 0:
        pytest.skip("needs root, to mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_alone(
    small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = small_disk / "saved"
    common = ["--keep", "1", "--checkpoint-dir", str(saved), *logs(tmp_path)]
    assert train_here(["--steps", "4", "--checkpoint-every", "4", *common])["saved"]
    (small_disk / "other").write_bytes(bytes(3 << 20))
    caplog.clear()
    summary = train_here(["--steps", "8", "--checkpoint-every", "2", "--resume", "auto", *common])
    assert (summary["steps"], summary["saved"]) == (8, False)
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert {message.split()[4] for message in said} == {"6", "8"}
    assert all("was not written" in message and "No space left" in message for message in said), said
    assert all("the last one is of step 4" in message for message in said), said
    assert [path.name for path in saved.glob("step-*")] == ["step-00000004"]
    (small_disk / "other").unlink()
    assert train_here(["--steps", "8", "--resume", "auto", *common])["saved"]


@pytest.mark.parametrize("value", ["0", "-1", "soon", "0m", "1.5", "m", "nanm"])
def test_a_bad_interval_is_refused(value: str) -> None:
    with pytest.raises(OptionError, match=rf"--checkpoint-every: '{value}' is refused; give steps, such as 500, or a"):
        train_here(["--checkpoint-every", value])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "2"], "argument --keep: there is nothing to save to; give --checkpoint-dir DIR"),
        (["--checkpoint-every", "5"], "argument --checkpoint-every: there is nothing to save to"),
        (["--checkpoint-dir", ""], "argument --checkpoint-dir: '' is refused"),
        (["--timeout", "1e20"], "argument --timeout: '1e20' is refused; give seconds"),
    ],
)
def test_options_that_would_do_nothing_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        train_here(arguments)


def test_fewer_steps_than_were_done_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"argument --steps: 5 is less than the 6 steps of .*step-00000006; give more"
    ):
        train_here(["--steps", "5", "--resume", str(saved), *logs(tmp_path)])


def test_the_settings_are_those_asked_for_on_resume(saved: Path, tmp_path: Path) -> None:
    changed = ["--set", "momentum=0.5", "--set", "weight_decay=0", "--checkpoint-dir", str(tmp_path / "new")]
    train_here(["--steps", "8", "--resume", str(saved), *changed, *logs(tmp_path)])
    (group,) = load(tmp_path / "new" / "step-00000008")["shared.pt"]["optimizer"]["param_groups"]
    assert (group["momentum"], group["weight_decay"]) == (0.5, 0)
    with pytest.raises(OptionError, match="its optimizer is 'sgd', this one's 'adamw'"):
        train_here(["--resume", str(saved / "step-00000006"), "--optimizer", "adamw", *logs(tmp_path)])


def test_new_checkpoints_stay_where_all_that_are_there_are_broken(saved: Path, tmp_path: Path) -> None:
    for path in saved.glob("step-*"):
        truncate(path)
    options = ["--steps", "3", "--checkpoint-dir", str(saved), "--resume", "auto", "--keep", "1"]
    assert train_here([*options, *logs(tmp_path)])["saved"]
    assert [path.name for path in saved.glob("step-*")] == ["step-00000003"]


def test_an_evaluation_that_a_signal_prevented_is_made_up_for(tmp_path: Path) -> None:
    """A signal before the end of an epoch saves at once; the evaluation comes when the run goes on."""
    common = ["--batch-size", "450", "--epochs", "4", *logs(tmp_path)]  # three steps an epoch
    whole = train_here([*common, "--checkpoint-dir", str(tmp_path / "whole")])
    saving = [*common, "--checkpoint-dir", str(tmp_path / "cut"), "--resume", "auto"]
    with pytest.raises(KeyboardInterrupt), interrupted_after(6):
        train_here(saving)
    assert load(tmp_path / "cut" / "step-00000006")["rank-00000.pt"]["totals"]["batch"] == 3
    rest = train_here(saving)
    measured = {"seconds": 0, "samples_per_second": 0}
    assert {**whole, **measured} == {**rest, **measured}
    ends = (tmp_path / name / "step-00000012" for name in ("whole", "cut"))
    left, right = (load(path) for path in ends)
    assert differences(left, right) == []


@contextmanager
def interrupted_after(steps: int) -> Iterator[None]:
    """A signal that comes just before a step; it leaves signals as they were, not ignored as at a process's end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def train_step(self: Trainer, *arguments: Any) -> None:
        whole(self, *arguments)
        if self.totals.steps == steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        whole = Trainer._train_step
        patch.setattr(Trainer, "_train_step", train_step)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# ---- signals


def trainers(process: "subprocess.Popen[str]") -> list[int]:
    """The processes of the ranks, which the launcher has started."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "train.py" in line]


def wait_for(holds: Callable[[], Any], process: "subprocess.Popen[str]", seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


SIGNALLED = {
    "TERM to one rank": (signal.SIGTERM, lambda process: trainers(process)[1:]),
    "USR1 to all ranks": (signal.SIGUSR1, trainers),
    "TERM to the launcher": (signal.SIGTERM, lambda process: [process.pid]),
    "USR1 to the launcher": (signal.SIGUSR1, lambda process: [process.pid]),
}


SLOW_CASES = [pytest.param(case, marks=pytest.mark.slow) for case in list(SIGNALLED)[1:]]


@pytest.mark.parametrize("case", ["TERM to one rank", *SLOW_CASES])
def test_a_signal_ends_the_run_with_a_checkpoint_of_one_step(tmp_path: Path, case: str) -> None:
    number, receivers = SIGNALLED[case]
    saved, ends = tmp_path / "saved", tmp_path / "ends"
    options = ["--epochs", "100000", "--checkpoint-dir", str(saved), *logs(tmp_path)]
    launcher = [*TORCHRUN, "--redirects", "3", "--log-dir", str(ends)]
    if case == "USR1 to the launcher":
        launcher += ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    process = start(*options, launcher=launcher)
    try:
        metrics = lambda: list((tmp_path / "logs").glob("*/metrics.jsonl"))  # noqa: E731
        wait_for(lambda: metrics() and metrics()[0].stat().st_size > 4000, process)
        for pid in receivers(process):
            os.kill(pid, number)
        asked = time.monotonic()
    finally:
        status, _, err = finish(process, timeout=60)
    assert time.monotonic() - asked < 30
    assert status != 0
    (checkpoint,) = saved.glob("step-*")
    done = read_manifest(checkpoint).step
    assert len(lines(metrics()[0])) == done > 0
    content = load(checkpoint)
    assert {content[f"rank-0000{rank}.pt"]["totals"]["steps"] for rank in range(2)} == {done}
    for path in ends.rglob("stderr.log"):
        assert "Traceback" not in path.read_text()
    if case.endswith("ranks"):
        assert f"exitcode  : {128 + number}" in err


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt, interrupt.deferred():
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.requested == 0
            os.kill(os.getpid(), signal.SIGUSR1)
            assert interrupt.status == 138
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- kills


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_rank_costs_nothing(tmp_path: Path) -> None:
    """Twenty moments, drawn from a seed: amid the start, the exchange, a save. Nobody helps but torchrun."""
    options = ["--steps", "40", "--checkpoint-every", "2", "--ratio", "0.01", *SMALL_BUCKETS, "--resume", "auto"]

    def begin(name: str) -> "subprocess.Popen[str]":
        folders = ["--checkpoint-dir", str(tmp_path / name), "--log-dir", str(tmp_path / f"{name}-logs"), "--quiet"]
        return start(*options, *folders, launcher=[*TORCHRUN, "--max-restarts", "3"])

    began = time.monotonic()
    status, _, err = finish(begin("undisturbed"), timeout=100)
    assert status == 0, err
    length = time.monotonic() - began
    expected = load(tmp_path / "undisturbed" / "step-00000040")
    random = torch.Generator().manual_seed(20)
    restarts = 0
    for number in range(20):
        moment, victim = torch.rand(2, generator=random).tolist()
        process = begin(f"run{number}")
        time.sleep((0.15 + 0.85 * moment) * length)
        ranks = trainers(process)
        if ranks:  # else it was over before
            os.kill(ranks[int(victim * len(ranks))], signal.SIGKILL)
        status, out, err = finish(process, timeout=150)
        assert status == 0, f"run {number}, killed after {moment:.2f} of it:\n{err}"
        assert strict(out.splitlines()[-1])["steps"] == 40
        assert differences(expected, load(tmp_path / f"run{number}" / "step-00000040")) == [], number
        restarts += "Signal 9 (SIGKILL)" in err or "exitcode: -9" in err
    assert restarts >= 10


@pytest.mark.slow
def test_a_stalled_rank_ends_the_job_after_the_timeout(tmp_path: Path) -> None:
    process = start("--epochs", "100000", "--timeout", "5", *logs(tmp_path), launcher=TORCHRUN)
    try:
        wait_for(lambda: any(p.stat().st_size > 2000 for p in (tmp_path / "logs").glob("*/metrics.jsonl")), process)
        stopped = trainers(process)[1]
        os.kill(stopped, signal.SIGSTOP)
        wait_for_end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < wait_for_end:
            time.sleep(0.2)
    finally:
        status, _, err = finish(process, timeout=60)
    assert status != 0
    assert re.search("[Tt]imed? ?out", err), err


# ---- drift


def check_drift(rank: int, world_size: int) -> str:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).half())
    check_replicas(model, 1)
    if rank == 1:
        with torch.no_grad():
            model[1].weight[2, 2] = torch.nextafter(model[1].weight[2, 2], torch.tensor(9.0, dtype=torch.float16))
    try:
        check_replicas(model, 2)
    except RunError as error:
        return str(error)
    return "nothing was found"


def test_drift_is_named_on_every_rank(worlds: Any) -> None:
    for said in worlds(2).run(check_drift):
        assert "after step 2 the ranks hold different values of parameter '1.weight' (1 of 4 parameters differ)" in said


def test_checksums_see_a_swap_and_a_sign_of_zero() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 0.0]]))
        before = checksums(model)
        model.weight.copy_(torch.tensor([[2.0, 1.0, 0.0]]))
        assert checksums(model) != before
        model.weight.copy_(torch.tensor([[1.0, 2.0, -0.0]]))
        assert checksums(model) != before


# ---- the hook's ratio


def test_another_ratio_keeps_the_residuals_and_forgets_what_was_learnt(worlds: Any) -> None:
    for before, after, learnt in worlds(2).run(check_ratio):
        assert before == after > 0
        assert learnt == []


def check_ratio(rank: int, world_size: int) -> tuple[float, float, list[Any]]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    state = SIDCoState(compressor="sidco-e", ratio=0.1)
    from sidco_ddp import sidco_hook

    model.register_comm_hook(state, sidco_hook)
    for _ in range(3):
        model(torch.randn(8, 64)).square().sum().backward()
    norm = sum(float(r.square().sum()) for r in state.state_dict()["residuals"].values())
    state.ratio = 0.01
    kept = sum(float(r.square().sum()) for r in state.state_dict()["residuals"].values())
    learnt = state.state_dict()["memory"]
    model(torch.randn(8, 64)).square().sum().backward()
    assert state.ratio == 0.01
    assert state.stats()["total"]["k"] == round(0.01 * (64 * 64 + 64))
    with pytest.raises(ValueError, match="ratio"):
        state.ratio = 2.0
    return norm, kept, learnt


# ---- a store that outlives the ranks


def test_what_an_earlier_attempt_left_in_the_store_is_not_read() -> None:
    """The order that made ranks wait for dead peers: a rank comes before rank 0 of its own attempt."""
    import threading

    store = torch.distributed.HashStore()
    for attempt in range(3):
        seen: dict[int, bytes] = {}

        def meet(rank: int, late: float, attempt: int = attempt, seen: dict[int, bytes] = seen) -> None:
            time.sleep(late)
            own = fresh_store(store, rank, 3)
            own.set(f"address/{rank}", str(attempt))
            seen[rank] = own.get(f"address/{(rank + 1) % 3}")

        threads = [threading.Thread(target=meet, args=(rank, 0.2 * (rank == 0))) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert seen == dict.fromkeys(range(3), str(attempt).encode())


def test_a_rank_that_does_not_come_is_waited_for_so_long_and_no_longer() -> None:
    store = torch.distributed.HashStore()
    for rank in range(2):
        with pytest.raises(RunError, match="did not come within the time"):
            fresh_store(store, rank, 3, timedelta(seconds=0.2))
