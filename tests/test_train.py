"""`train.py` from the outside: what it prints, what it leaves behind, and how it says no."""

import fcntl
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from trainruns import (
    LAUNCHER_VARIABLES,
    TORCHRUN,
    environment,
    finish,
    lines,
    only_folder,
    start,
    strict,
    train_here,
    train_module,
)

from sidco_ddp import COMPRESSORS
from sidco_ddp.training.distributed import World, find_world
from sidco_ddp.training.errors import OptionError
from sidco_ddp.training.evaluation import evaluate as evaluate_all
from sidco_ddp.training.plan import make_plan
from sidco_ddp.training.record import RunRecord, _make_folder, to_json
from sidco_ddp.training.summary import Totals, compression_metrics
from sidco_ddp.workloads import TASKS, Shard, make_task

SUMMARY_KEYS = [
    *("task", "compressor", "ratio", "world_size", "steps", "epochs", "train_loss", "metric_name", "metric"),
    *("khat_over_k_mean", "khat_over_k_min", "khat_over_k_max", "bytes_sent_per_step", "dense_bytes_per_step"),
    *("samples_per_second", "seconds"),
]
STEP_KEYS = {
    *("ratio", "data_seconds", "compute_seconds", "optimizer_seconds"),
    *("step", "epoch", "loss", "lr", "raw_khat_over_k", "khat_over_k", "stages", "bytes_sent", "dense_bytes"),
    *("compress_seconds", "exchange_seconds", "step_seconds"),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """stdout, stderr and run folder of two ranks that trained for six steps, the first two of them dense."""
    log_dir = tmp_path_factory.mktemp("runs") / "not" / "there" / "yet"
    options = ["--steps", "6", "--dense-steps", "2", "--ratio", "0.01", "--batch-size", "8"]
    status, out, err = finish(start(*options, "--log-dir", str(log_dir), launcher=TORCHRUN))
    assert status == 0, err
    return out, err, only_folder(log_dir)


def test_the_only_line_on_stdout_is_the_summary(launched: tuple[str, str, Path]) -> None:
    out, err, _ = launched
    summary = strict(out)
    assert out.count("\n") == 1
    assert [key for key in summary if key in SUMMARY_KEYS] == SUMMARY_KEYS
    assert (summary["scale"], summary["seed"], summary["higher_is_better"]) == ("paper", 0, True)
    assert summary["metrics"] == {"accuracy": summary["metric"]}
    assert (summary["task"], summary["compressor"], summary["ratio"]) == ("digits", "sidco-e", 0.01)
    assert (summary["world_size"], summary["steps"], summary["epochs"]) == (2, 6, 1)
    assert summary["metric_name"] == "accuracy"
    assert 0 <= summary["metric"] <= 1
    assert 0 < summary["train_loss"] < 5
    assert 0.8 <= summary["khat_over_k_min"] <= summary["khat_over_k_mean"] <= summary["khat_over_k_max"] <= 1.2
    assert 0 < summary["bytes_sent_per_step"] < summary["dense_bytes_per_step"] == 4 * 297_450
    assert summary["samples_per_second"] > 0
    assert summary["seconds"] > 0
    assert "Warning" not in err
    assert err.count("epoch 1/30  step 6/6") == 1  # one line an epoch, by one rank


def test_the_run_folder_tells_the_run(launched: tuple[str, str, Path]) -> None:
    out, _, folder = launched
    summary = strict(out)
    assert folder.name.split("-", 2)[2] == "digits-sidco-e-0.01"
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.jsonl", "evaluations.jsonl", "summary.json"} < names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert strict((folder / "summary.json").read_text()) == summary
    config = strict((folder / "config.json").read_text())
    assert (config["batch_size"], config["lr"], config["world_size"], config["device"]) == (8, 0.05, 2, "cpu")

    steps = lines(folder / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert {step["epoch"] for step in steps} == {1}
    assert all(set(step) == STEP_KEYS for step in steps)
    assert all(0 <= step["compress_seconds"] < step["step_seconds"] for step in steps)
    # the first two went out whole: there is no k̂ to speak of, and all bytes were sent
    assert [step["khat_over_k"] is None for step in steps] == [True, True, False, False, False, False]
    assert [step["bytes_sent"] >= step["dense_bytes"] for step in steps] == [True, True, False, False, False, False]
    assert {step["dense_bytes"] for step in steps} == {4 * 297_450}
    ratios = [step["khat_over_k"] for step in steps[2:]]
    assert (summary["khat_over_k_min"], summary["khat_over_k_max"]) == (min(ratios), max(ratios))
    assert summary["khat_over_k_mean"] == pytest.approx(sum(ratios) / 4)
    assert summary["bytes_sent_per_step"] == pytest.approx(sum(step["bytes_sent"] for step in steps) / 6)
    assert summary["samples_per_second"] == pytest.approx(6 * 2 * 8 / sum(step["step_seconds"] for step in steps))

    (evaluation,) = lines(folder / "evaluations.jsonl")
    assert (evaluation["step"], evaluation["samples"]) == (6, 6 * 2 * 8)
    assert (evaluation["metric"], evaluation["train_loss"]) == (summary["metric"], summary["train_loss"])


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`train.py` as a module, as if no launcher had started the tests."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    module = train_module()
    handler = signal.getsignal(signal.SIGINT)
    yield module
    assert signal.getsignal(signal.SIGINT) == handler  # put back, whatever came of it


def test_one_process_by_itself_and_the_seed_decides(tmp_path: Path, train: ModuleType) -> None:
    common = ["--steps", "3", "--quiet", "--log-dir", str(tmp_path)]
    status, out, err = finish(start(*common, "--seed", "7"))
    assert (status, err) == (0, "")
    first, again = strict(out), train_here([*common, "--seed", "7"])
    other = train_here([*common, "--seed", "8", "--compressor", "none", "--optimizer", "nesterov"])
    assert first["world_size"] == 1
    assert {**first, "seconds": 0, "samples_per_second": 0} == {**again, "seconds": 0, "samples_per_second": 0}
    assert other["train_loss"] != first["train_loss"]
    assert [other[f"khat_over_k_{name}"] for name in ("mean", "min", "max")] == [None] * 3
    assert other["bytes_sent_per_step"] == other["dense_bytes_per_step"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_bar_on_a_terminal_and_null_for_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(ours, 4096):
                written.append(chunk)
        except OSError:  # how a terminal says that nobody is on its other side any more
            pass

    # a terminal that does not tell its width, as in some containers
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    process = start("--steps", "3", "--lr", "1e30", "--log-dir", str(tmp_path), stderr=theirs)
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    status, out, _ = finish(process)
    reader.join()
    os.close(ours)
    shown = b"".join(written).decode()
    assert status == 0, shown
    assert "3/3" in shown
    assert "step/s" in shown
    assert "the training loss is not finite; a lower --lr may help" in shown
    assert strict(out)["train_loss"] is None
    assert lines(only_folder(tmp_path) / "metrics.jsonl")[-1]["loss"] is None


# ---- refusals

NAMES = ".*".join(map(repr, COMPRESSORS))
REFUSED = [
    (["--compressor", "sidco"], rf"argument --compressor: .*'sidco'.*{NAMES}"),
    (["--task", "mnist"], rf"argument --task: .*'mnist'.*{'.*'.join(map(repr, TASKS))}"),
    *((["--ratio", value], rf"argument --ratio: '{value}' .*0\.001") for value in ("0", "-1", "1.5", "nan", "abc")),
    *((["--epochs", value], rf"argument --epochs: '{value}' .*at least 1") for value in ("0", "-1", "1.5")),
    *((["--steps", value], rf"argument --steps: '{value}' .*at least 1") for value in ("0", "-3")),
    *((["--batch-size", value], rf"argument --batch-size: '{value}' .*at least 1") for value in ("0", "-3")),
    *((["--lr", value], rf"argument --lr: '{value}' .*above 0") for value in ("0", "-0.1", "nan", "inf")),
    (["--bucket-cap-mb", "0"], r"argument --bucket-cap-mb: '0' .*above 0"),
    (["--dense-steps", "-1"], r"argument --dense-steps: '-1' .*at least 0"),
    (["--seed", "-1"], r"argument --seed: '-1' .*at least 0"),
    (["--optimizer", "lbfgs"], r"argument --optimizer: .*'lbfgs'.*'sgd'.*'nesterov'"),
    (["--batch-size", "1353"], r"argument --batch-size: 1353 is more than the 1352 .* give at most 1352"),
    (["--compresor", "topk"], r"unrecognized arguments: --compresor topk; did you mean --compressor\?"),
    (["--comp", "topk"], r"unrecognized arguments: --comp topk"),  # no abbreviations
    (["--zzz"], r"unrecognized arguments: --zzz; --help lists the options"),
    (["digits"], r"unrecognized arguments: digits"),
    (["--backend", "nccl", "--device", "cpu"], r"argument --backend: 'nccl' .*--backend gloo"),
    (["--device", "tpu"], r"argument --device: .*'tpu'.*'auto', 'cpu', 'cuda'"),
]


def refusal(train: ModuleType, capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        train.main(arguments)
    out, err = capfd.readouterr()
    assert (left.value.code, out) == (2, "")
    assert err.startswith("train.py: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=["=".join(arguments) for arguments, _ in REFUSED])
def test_a_bad_option_is_refused_in_one_line(
    train: ModuleType, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    err = refusal(train, capfd, *arguments)
    assert re.search(message, err), err


def test_cuda_where_there_is_none(
    train: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "argument --device: 'cuda' is not available here; give --device cpu" in refusal(
        train, capfd, "--device", "cuda"
    )
    assert find_world("auto", "auto", {}).device.type == "cpu"


def test_a_launcher_that_says_half(
    train: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "RANK is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not" in refusal(train, capfd)
    for name, value in {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "RANK='2' is not one of WORLD_SIZE='2' ranks" in refusal(train, capfd)


def test_a_plain_refusal_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Also the first option that is found out late, once there is a process group. Root may write anywhere but here."""
    (tmp_path / "file").write_text("")
    log_dir = str(tmp_path / "file" / "runs")
    status, out, err = finish(start("--log-dir", log_dir))
    assert (status, out) == (2, "")
    reason = f"{log_dir!r} cannot be written (Not a directory); give a folder that can"
    assert err == f"train.py: error: argument --log-dir: {reason}\n"


@pytest.mark.parametrize("case", ["option", "log-dir"])
def test_all_ranks_leave_with_status_2_and_one_of_them_says_why(tmp_path: Path, case: str) -> None:
    (tmp_path / "file").write_text("")
    arguments = {"option": ["--ratio", "1.5"], "log-dir": ["--log-dir", str(tmp_path / "file" / "runs")]}[case]
    # The launcher ends all ranks when one is gone. The rank that is to say why comes late here, and must be heard.
    late = f'[ "$RANK" = 1 ] || sleep 3; exec "{sys.executable}" "$0" "$@"'
    logs = tmp_path / "logs"
    launcher = [*TORCHRUN, "--redirects", "3", "--log-dir", str(logs), "--no-python", "bash", "-c", late]
    status, out, err = finish(start(*arguments, launcher=launcher))
    assert status != 0
    assert out == ""
    assert "exitcode  : 2" in err  # torchrun's report; that of the rank which it saw first
    said = {path.parent.name: path.read_text() for path in logs.rglob("stderr.log")}
    assert said["1"] == ""
    assert said["0"].startswith("train.py: error: argument --")
    assert said["0"].count("\n") == 1


# ---- Ctrl-C


@pytest.mark.parametrize("launcher", [None, TORCHRUN], ids=["plain", "torchrun"])
def test_ctrl_c_ends_a_run_quickly_and_leaves_whole_lines(tmp_path: Path, launcher: list[str] | None) -> None:
    process = start("--epochs", "10000", "--log-dir", str(tmp_path), launcher=launcher)
    try:
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size > 2000 for path in tmp_path.glob("*/metrics.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher and to the workers
        asked = time.monotonic()
    finally:
        status, out, err = finish(process, timeout=40)
    assert time.monotonic() - asked < 20
    assert out == ""
    assert "in _train_step" not in err  # no traceback of ours; torchrun prints its own
    if launcher is None:
        assert status == 130
        assert "Traceback" not in err
    steps = lines(only_folder(tmp_path) / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))


# ---- the end of the process group

OUTLIVED = """
import gc
import sys
from pathlib import Path
import torch
import train
from sidco_ddp.training.distributed import find_world, process_group

gc.disable()  # that it may happen to run in time is not enough

def group_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]

def break_off():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert group_threads()
    raise RuntimeError("broken off")

assert train.main(["--steps", "2", "--log-dir", sys.argv[1]]) == 0
assert group_threads() == []
try:
    with process_group(find_world("cpu", "gloo")):
        break_off()
except RuntimeError as error:
    assert group_threads() == [], error
else:
    raise AssertionError("nothing was raised")
"""


def test_the_group_ends_with_its_threads(tmp_path: Path) -> None:
    """Once in ten runs a rank aborted after its last line ("terminate called without an active exception", status -6):
    the group outlived `destroy_process_group`, and one of its threads the interpreter.
    """
    command = [sys.executable, "-c", OUTLIVED, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- the parts


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [
        (None, None, (30, 300)),
        (3, None, (3, 30)),
        (3, 7, (3, 7)),
        (3, 99, (3, 30)),
        (None, 7, (30, 7)),
        (None, 301, (31, 301)),
    ],
)
def test_the_length_of_a_run(epochs: int | None, steps: int | None, expected: tuple[int, int]) -> None:
    plan = make_plan(num_samples=85, global_batch=8, epochs=epochs or 30, steps=steps, is_fixed=epochs is not None)
    assert (plan.epochs, plan.total_steps) == expected


def bucket(k: int, sent: int, raw: int, *, dense: bool = False) -> dict[str, Any]:
    return {"k": k, "sent_khat": sent, "raw_khat": raw, "stages": 2, "dense": dense}


def test_khat_over_k_is_of_the_compressed_buckets_and_steps() -> None:
    totals = {"bytes_sent": 100, "dense_bytes": 4000, "compress_seconds": 0.1, "exchange_seconds": 0.2}
    sums = Totals()
    whole = bucket(500, 500, 0, dense=True)
    mixed = compression_metrics({"buckets": [bucket(10, 12, 5), bucket(30, 36, 35), whole], "total": totals})
    assert (mixed["khat_over_k"], mixed["raw_khat_over_k"]) == (48 / 40, 1.0)
    sums.add(1.0, 8, 0.5, mixed)
    sums.add(1.0, 8, 0.5, compression_metrics({"buckets": [bucket(10, 9, 9)], "total": totals}))
    sums.add(1.0, 8, 0.5, compression_metrics({"buckets": [whole], "total": totals}))
    summary = sums.summary()
    assert summary["khat_over_k_mean"] == pytest.approx((1.2 + 0.9) / 2)
    assert (summary["khat_over_k_min"], summary["khat_over_k_max"]) == (0.9, 1.2)
    assert (summary["bytes_sent_per_step"], summary["dense_bytes_per_step"]) == (100, 4000)


def test_what_is_not_finite_is_null() -> None:
    line = to_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert line == '{"a": null, "b": [null, 1.5], "c": {"d": null}}'


def test_every_line_is_written_at_once_as_nothing_may_come_after_it(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, {})
    record.step({"step": 1, "epoch": 1, "loss": 0.5})
    record.evaluation({"step": 1, "epoch": 1, "metric": 0.25})
    written = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "evaluations.jsonl")
    record.close()
    assert written == ([{"step": 1, "epoch": 1, "loss": 0.5}], [{"step": 1, "epoch": 1, "metric": 0.25}])


def evaluate(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank makes of an evaluation by all ranks, and by the main rank alone."""
    torch.manual_seed(5)
    task = make_task("digits")
    model = task.make_model()
    alone = task.metrics(task.evaluate(model, Shard()))
    replica = DistributedDataParallel(model)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.add_(rank)  # as after a step: the ranks have seen different batches
    totals = Totals(epoch_loss=(rank + 1.0) ** 2, epoch_steps=rank + 1)
    together = evaluate_all(task, replica.module, totals, World(rank, world_size, True, torch.device("cpu"), "gloo"))
    return together, {"metric": alone["accuracy"], "metrics": alone, "metric_name": "accuracy"}


def test_evaluation_is_of_the_main_ranks_model_on_each_test_sample_once(worlds: Any) -> None:
    for together, alone in worlds(3).run(evaluate):
        assert together == {**alone, "train_loss": pytest.approx((1 + 4 + 9) / 6)}


def test_two_runs_in_the_same_second_get_a_folder_each(tmp_path: Path) -> None:
    assert [_make_folder(tmp_path, "run").name for _ in range(3)] == ["run", "run-2", "run-3"]


def test_more_workers_than_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    world = find_world("auto", "auto", {**place, "LOCAL_WORLD_SIZE": "2"})
    assert (world.rank, world.world_size, world.device, world.backend) == (5, 8, torch.device("cuda", 1), "nccl")
    with pytest.raises(OptionError, match=r"--device: 'cuda' has 2 device\(s\) here for 4 workers"):
        find_world("auto", "auto", {**place, "LOCAL_WORLD_SIZE": "4"})


# ---- settings, targets, data


def test_the_tasks_are_listed_with_their_recipes(train: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--list-tasks"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for name, kind in TASKS.items():
        assert f"\n{name}: " in f"\n{out}"
        assert f"lr={kind.recipes['paper'].lr}  " in out


def test_settings_reach_the_run(tmp_path: Path, train: ModuleType) -> None:
    short = ["--epochs", "3", "--ratio", "0.01", "--ratio-warmup-epochs", "2", "--batch-size", "100"]
    sets = ["--set", "evaluate_every=2", "--set", "lr=0.1", "--set", "warmup_epochs=0", "--set", "schedule=step"]
    summary = train_here([*short, *sets, "--set", "clip_norm=0.001", "--log-dir", str(tmp_path)])
    folder = only_folder(tmp_path)
    steps = lines(folder / "metrics.jsonl")
    assert [evaluation["epoch"] for evaluation in lines(folder / "evaluations.jsonl")] == [2, 3]
    assert summary["epochs"] == 3
    assert [step["ratio"] for step in steps[::13]] == pytest.approx([0.25, 0.05, 0.01])
    assert [step["lr"] for step in steps[::13]] == pytest.approx([0.1, 0.1, 0.01])  # at 0.5 and 0.75 of three epochs
    sent = [step["bytes_sent"] for step in steps[::13]]
    assert sent[0] > sent[1] > sent[2]
    config = strict((folder / "config.json").read_text())
    assert config["recipe"]["clip_norm"] == 0.001
    assert abs(steps[-1]["loss"] - steps[0]["loss"]) < 0.3  # steps as small as the clip makes them


def test_a_target_ends_the_run_at_the_evaluation_that_meets_it(tmp_path: Path, train: ModuleType) -> None:
    common = ["--compressor", "none", "--log-dir", str(tmp_path)]
    summary = train_here([*common, "--epochs", "9", "--target", "0.5"])
    assert summary["epochs"] < 9
    assert summary["metric"] >= 0.5 == summary["target"]
    assert summary["target_steps"] == summary["steps"]
    assert summary["target_bytes"] == summary["steps"] * summary["bytes_sent_per_step"]
    assert 0 < summary["target_seconds"] <= summary["seconds"]
    missed = train_here([*common, "--epochs", "1", "--target", "0.99"])
    assert [missed[f"target_{name}"] for name in ("seconds", "steps", "bytes")] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "75"], r"--target: 75 is no accuracy; give a number above 0 and at most 1"),
        (
            ["--target", "0.01"],
            r"--target: 0\.01 is no goal: the untrained model has accuracy .*; give a higher target",
        ),
        (["--set", "lr"], r"--set: 'lr' is refused; give name=value"),
        (["--set", "widht=3"], r"setting 'widht' is unknown to this task; it has epochs"),
        (["--set", "lr=0.1", "--lr", "0.2"], r"--set: 'lr=0.1' contradicts lr=0.2; give one of them"),
        (["--corpus", "ptb"], r"setting 'corpus' is unknown to this task"),
        (
            ["--task", "cifar10-resnet20", "--data-dir", "/nowhere"],
            r"--data-dir '/nowhere': CIFAR-10 is not there whole",
        ),
    ],
)
def test_what_the_task_refuses(
    tmp_path: Path,
    train: ModuleType,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    err = refusal(train, capfd, *arguments, "--quiet", "--log-dir", str(tmp_path))
    assert re.search(message, err), err


BROKEN_LATE = """
import sys
import train
from sidco_ddp.workloads import DataError
from sidco_ddp.workloads.digits import Digits

def batches(self, *, shard, **asked):
    for number, batch in enumerate(whole(self, shard=shard, **asked)):
        if shard.rank == 1 and number == 2:
            raise DataError("data/broken.png: cannot be read; fetch it anew")
        yield batch

whole, Digits.batches = Digits.batches, batches
sys.exit(train.main(sys.argv[1:]))
"""


def test_a_file_that_breaks_on_one_rank_amid_training_ends_all_with_status_2(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN_LATE)
    logs = tmp_path / "logs"
    launcher = [*TORCHRUN, "--redirects", "3", "--log-dir", str(logs), str(script)]
    process = subprocess.Popen(
        [*launcher, "--log-dir", str(tmp_path / "runs"), "--quiet"],
        env=environment(),
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    status, _, err = finish(process)
    assert status != 0
    said = {path.parent.name: path.read_text() for path in logs.rglob("stderr.log")}
    assert said["1"] == "train.py: error: data/broken.png: cannot be read; fetch it anew\n"
    assert "Traceback" not in said["0"]
    assert "exitcode  : 2" in err
