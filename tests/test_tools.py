"""``sidco-ddp bench``: what it measures, prints, writes, and how it says no."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sidco_ddp import COMPRESSORS, make_compressor
from sidco_ddp.tools import bench, measure, memory
from sidco_ddp.tools.cli import main
from sidco_ddp.tools.measure import Case, run_case
from sidco_ddp.tools.sources import SHAPES, SOURCES
from sidco_ddp.tools.step import Step
from sidco_ddp.tools.table import render

QUICK = ["bench", "--sizes", "20k", "--ratios", "0.1,0.01", "--repeats", "3", "--warmup", "1", "--devices", "cpu"]
SPREAD = {"min", "q1", "median", "q3", "max"}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def refuse(arguments, capsys):
    """The one line of an error."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, "one line"
    return err


def test_table_and_json(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main([*QUICK, "--json", str(file), "--threads", "2"]) == 0
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert set(report) == {"format", "environment", "repeats", "warmup", "seed", "cases"}
    assert report["format"] == bench.FORMAT
    assert (report["repeats"], report["warmup"]) == (3, 1)
    assert report["environment"]["threads"] == 2
    assert "2 threads used" in out
    assert [case["ratio"] for case in report["cases"]] == [0.1, 0.01]
    sparse = [name for name in COMPRESSORS if make_compressor(name).sparse]
    for case in report["cases"]:
        assert case["elements"] == 20_000
        assert case["k"] == case["ratio"] * 20_000
        assert (case["device"], case["label"], case["source"]) == ("cpu", "20k", "laplace")
        assert set(case["floor_seconds"]) == SPREAD
        assert [result["compressor"] for result in case["results"]] == sparse
        topk = next(result for result in case["results"] if result["compressor"] == "topk")
        for result in case["results"]:
            seconds, quality = result["seconds"], result["khat_over_k"]
            assert set(seconds) == SPREAD
            assert set(quality) == SPREAD | {"mean"}
            assert 0 < seconds["min"] <= seconds["q1"] <= seconds["median"] <= seconds["q3"] <= seconds["max"] < 10
            assert quality["min"] <= quality["mean"] <= quality["max"]
            assert result["speedup_over_topk"] == pytest.approx(topk["seconds"]["median"] / seconds["median"])
            assert result["times_floor"] == pytest.approx(seconds["median"] / case["floor_seconds"]["median"])
            assert result["ns_per_element"] == pytest.approx(seconds["median"] / 20_000 * 1e9)
            assert f"\n{result['compressor']} " in out
        assert topk["khat_over_k"]["mean"] == 1.0
    assert "cpu, 20k = 20,000 elements, laplace, ratio 0.01, k = 200; floor" in out
    assert str(tmp_path) not in file.read_text()


def test_every_source_shape_and_compressor_runs(capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "resnet20", 3000)
    everything = ["--source", ",".join(SOURCES), "--shape", "resnet20", "--compressors", ",".join(COMPRESSORS)]
    assert main(["bench", *everything, "--ratios", "0.01", "--repeats", "1", "--warmup", "1", "--devices", "cpu"]) == 0
    out = capsys.readouterr().out
    for source in SOURCES:
        assert f"cpu, resnet20 = 3,000 elements, {source}, ratio 0.01, k = 30" in out
    assert "20k" not in out, "a shape alone leaves the default sizes out"


def test_shapes_are_the_papers():
    assert SHAPES == {"resnet20": 269_722, "vgg16": 14_982_987, "resnet50": 25_559_081, "lstm": 66_034_000}


def test_without_topk_there_is_no_speedup(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main([*QUICK, "--compressors", "sidco-e", "--json", str(file)]) == 0
    for case in json.loads(file.read_text())["cases"]:
        assert case["results"][0]["speedup_over_topk"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["bnech"], "invalid choice: 'bnech'"),
        (["bench", "--sizes", "2.6X"], "--sizes: '2.6X' is not a number of elements; write 26000000, 260k or 26M"),
        (["bench", "--sizes", "0"], "--sizes: '0' is not a number of elements"),
        (["bench", "--sizes", "nan"], "--sizes: 'nan' is not a number of elements"),
        (["bench", "--sizes", "20k,"], "--sizes: '' is not a number of elements"),
        (["bench", "--shape", "vgg"], "--shape: 'vgg' is none of resnet20, vgg16, resnet50, lstm"),
        (["bench", "--source", "normal"], "--source: 'normal' is none of laplace, t3, error-fed"),
        (["bench", "--ratios", "0.1,2"], r"--ratios: '2' is not a number in (0, 1]; write 0.001"),
        (["bench", "--ratios", "x"], "--ratios: 'x' is not a number in"),
        (["bench", "--compressors", "topk,sidco"], "--compressors: 'sidco' is none of none, topk, randomk"),
        (["bench", "--devices", "tpu"], "--devices: 'tpu' is none of cpu, cuda"),
        (["bench", "--devices", "cuda"], "--devices: 'cuda' is not there; leave it out"),
        (["bench", "--threads", "0"], "--threads: '0' is not a whole number of at least 1"),
        (["bench", "--repeats", "-3"], "--repeats: '-3' is not a whole number of at least 1"),
        (["bench", "--warmup", "1.5"], "--warmup: '1.5' is not a whole number of at least 1"),
        (["bench", "--json", "no/such/folder/x.json"], "--json: 'no/such/folder/x.json' is in no existing folder"),
        (["bench", "--ratio", "0.1"], "unrecognized arguments: --ratio 0.1"),
        (["bench", "--sizes", "900000G"], "900000G (laplace) with 8 compressors needs about"),
    ],
)
def test_errors_are_one_line_with_the_remedy(arguments, message, capsys, monkeypatch):
    without_cuda(monkeypatch)
    line = refuse(arguments, capsys)
    assert message in line
    assert line.startswith("sidco-ddp")
    assert line.rstrip().endswith("--help)")


def test_missing_matplotlib_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    line = refuse([*QUICK, "--png", str(tmp_path / "bench.png")], capsys)
    assert "--png: matplotlib is missing; pip install 'sidco_ddp[bench]', or leave --png out" in line


@pytest.mark.parametrize("compressors", ["topk,dgc,sidco-e", "sidco-p"])
def test_png(tmp_path, capsys, compressors):
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.png"
    assert main([*QUICK, "--source", "laplace,t3", "--compressors", compressors, "--png", str(file)]) == 0
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert width >= 1500
    assert height >= 2 * 300, "a row of panels for each source"


def test_console_command_is_declared_and_lists_its_options():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'sidco-ddp = "sidco_ddp.tools.cli:main"' in project
    code = [sys.executable, "-W", "error", "-m", "sidco_ddp.tools.cli", "bench", "--help"]
    shown = subprocess.run(
        code, check=True, timeout=100, capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    for option in ("--sizes", "--shape", "--source", "--ratios", "--compressors", "--threads", "--json", "--png"):
        assert option in shown.stdout


def test_steps_keep_their_residual_and_can_forget_it():
    gradient = torch.randn(1000)
    step = Step(make_compressor("topk", ratio=0.01), 1000)
    once = step.compressor.compress(gradient, step.compressor.init(1000))[0]
    assert step(gradient.clone()) == once.count == step.k
    assert int((step._feedback.state_dict()["gradient"] == 0).sum()) == step.k
    step(gradient.clone())
    residual = step._feedback.state_dict()["gradient"]
    twice = (residual == 2 * gradient) | (residual == 0) | (residual == gradient)
    assert twice.all(), "what was not sent waits, what was sent is gone"
    assert (residual == 2 * gradient).sum() > 900
    fresh = Step(make_compressor("topk", ratio=0.01), 1000)
    for _ in range(3):
        fresh(gradient.clone())
        fresh.forget()
        assert not fresh._feedback.state_dict()["gradient"].any()


def test_plain_sources_are_what_every_scheme_sees_and_error_fed_ones_add_up(monkeypatch):
    """A residual that grows from round to round would time every round on another vector than the source's."""
    seen = {}
    original = Step.__call__

    def watched(self, gradient):
        count = original(self, gradient)
        seen.setdefault(type(self.compressor).__name__, []).append(self._feedback.norm(self._layout))
        return count

    monkeypatch.setattr(Step, "__call__", watched)
    for source, grows in (("laplace", False), ("error-fed", True)):
        seen.clear()
        run_case(Case("cpu", "x", 20_000, source, 0.001), ["topk", "dgc"], repeats=8, warmup=4, seed=0)
        for name, norms in seen.items():
            last = norms[-12:]
            assert (last[-1] > 2 * last[0]) == grows, (source, name)


def test_case_interleaves_and_times_what_it_says(monkeypatch):
    """A clock that each runner advances by its own amount: the medians must be those, in whatever order they run."""
    order, now = [], [0.0]
    cost = {"TopKCompressor": 8.0, "SidcoCompressor": 2.0}
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    original_add = torch.add

    def add(*args, **options):
        if options.get("out") is not None and "alpha" not in options:
            order.append("floor")
            now[0] += 0.5
        return original_add(*args, **options)

    def step(self, gradient):
        order.append(type(self.compressor).__name__)
        now[0] += cost[order[-1]]
        return 2 * self.k

    monkeypatch.setattr(measure.torch, "add", add)
    monkeypatch.setattr(Step, "__call__", step)
    monkeypatch.setattr(Step, "forget", lambda self: None)
    monkeypatch.setattr(memory, "measure", lambda make, gradient: memory.Memory(None, None))
    case = run_case(Case("cpu", "x", 1000, "laplace", 0.01), ["topk", "sidco-e"], repeats=3, warmup=1, seed=0)
    topk, sidco = case["results"]
    assert (topk["seconds"]["median"], sidco["seconds"]["median"], case["floor_seconds"]["median"]) == (8.0, 2.0, 0.5)
    assert (topk["speedup_over_topk"], sidco["speedup_over_topk"]) == (1.0, 4.0)
    assert sidco["times_floor"] == 4.0
    assert sidco["khat_over_k"]["mean"] == 2.0
    rounds = [order[2:][start : start + 3] for start in range(0, 12, 3)]
    assert all(len(set(names)) == 3 for names in rounds), "each of the three once a round"
    assert len({names[0] for names in rounds}) == 3, "and each comes first in turn"
    assert "  -  " in render(case), "memory that is not known is a dash"


@pytest.mark.skipif(not memory._Process().works, reason="this system does not tell a process's peak memory")
def test_memory_sees_what_is_kept_and_what_is_not():
    mebibyte = 1 << 20

    def make_step():
        kept = torch.ones(8 * mebibyte)  # 32 MiB

        def step(gradient):
            return int((torch.ones(16 * mebibyte).sum() + kept[0]) > 0)  # 64 MiB

        return step

    found = memory.measure(make_step, torch.zeros(1))
    assert found.held == pytest.approx(32 * mebibyte, abs=4 * mebibyte)
    assert found.scratch == pytest.approx(64 * mebibyte, abs=4 * mebibyte)


@pytest.mark.parametrize(("source", "beyond"), [("laplace", 0.0498), ("t3", 0.0577)])
def test_sources_are_what_they_are_called(source, beyond):
    """Two-sided tail probability beyond 3: e⁻³ for Laplace, 0.0577 for Student's t with three degrees of freedom."""
    out = torch.empty(400_000)
    SOURCES[source](out, 0, torch.Generator().manual_seed(1))
    assert out.isfinite().all()
    assert (out.abs() > 3).float().mean().item() == pytest.approx(beyond, rel=0.05)
    assert (out > 0).float().mean().item() == pytest.approx(0.5, abs=0.01)


def test_error_fed_gradients_decay():
    first, later = torch.empty(100_000), torch.empty(100_000)
    SOURCES["error-fed"](first, 0, torch.Generator().manual_seed(1))
    SOURCES["error-fed"](later, 30, torch.Generator().manual_seed(2))
    assert later.abs().mean() / first.abs().mean() == pytest.approx(0.5, rel=0.05)


@pytest.mark.gpu
def test_cuda_is_measured_too(capsys):
    assert main([*QUICK, "--devices", "cpu,cuda"]) == 0
    assert "\ncuda, 20k" in capsys.readouterr().out
