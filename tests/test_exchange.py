"""``sidco-ddp exchange``: what it measures between ranks, and writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launching import ROOT, environment

from sidco_ddp.tools import exchange
from sidco_ddp.tools.cli import main
from sidco_ddp.tools.sources import SHAPES

SPREAD = {"min", "q1", "median", "q3", "max"}
QUICK = ["exchange", "--elements", "40k", "--device", "cpu", "--repeats", "3", "--warmup", "2", "--ratios", "0.1,0.01"]


def rows(out):
    """Of the printed table: compressor and ratio."""
    return [tuple(line.split()[:2]) for line in out.splitlines()[3:]]


def check(report, world_size):
    assert report["format"] == exchange.FORMAT
    assert report["environment"]["world_size"] == world_size
    assert report["elements"] == 40_000
    assert (report["repeats"], report["warmup"], report["source"]) == (3, 2, "t3")
    names = [(case["compressor"], case["ratio"]) for case in report["cases"]]
    assert names == [("none", 1.0), *((name, kept) for name in ("topk", "sidco-e") for kept in (0.1, 0.01))]
    for case in report["cases"]:
        for name in ("step", "backward", "whole", "compress", "rest", "in_flight"):
            assert set(case[f"{name}_seconds"]) == SPREAD
        assert 0 < case["compress_seconds"]["median"] < case["step_seconds"]["median"] < 10
        assert case["whole_seconds"]["median"] <= case["step_seconds"]["max"]
        assert case["dense_bytes"] == 160_000
        if case["compressor"] == "none":
            assert case["bytes_sent"] == 160_000
            assert case["speedup_over_none"] == 1.0
        else:
            assert case["k"] == case["ratio"] * 40_000
            assert 0.8 <= case["sent_khat"] / case["k"] <= 1.2
            assert case["bytes_sent"] == pytest.approx(8 * 1.2 * case["k"], rel=0.1)


def test_table_and_json(tmp_path, capsys):
    file = tmp_path / "exchange.json"
    assert main([*QUICK, "--note", "one process", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    report = json.loads(file.read_text())
    check(report, 1)
    assert report["note"] == "one process"
    assert "1 ranks, gloo, 40,000 elements (t3)" in out
    assert rows(out) == [(case["compressor"], f"{case['ratio']:g}") for case in report["cases"]]
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_between_two_ranks_one_of_them_reports(tmp_path):
    file = tmp_path / "exchange.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["sidco_ddp.tools.cli", *QUICK, "--output", str(file)]
    done = subprocess.run(
        command, env=environment(OMP_NUM_THREADS="1"), cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    check(json.loads(file.read_text()), 2)
    assert len(rows(done.stdout)) == 5


def test_without_none_there_is_no_speedup(capsys):
    assert main([*QUICK, "--compressors", "sidco-e"]) == 0
    assert all(line.split()[-1] == "-" for line in capsys.readouterr().out.splitlines()[3:])


def test_each_timed_step_has_its_like_without_an_exchange(monkeypatch, capsys):
    exchanged = []
    original = exchange._timed_backward

    def watched(replica, step, world):
        exchanged.append(replica.require_backward_grad_sync)
        return original(replica, step, world)

    monkeypatch.setattr(exchange, "_timed_backward", watched)
    assert main([*QUICK, "--compressors", "none"]) == 0
    assert exchanged == [True, True] + [False, True] * 5, "two steps for DDP's buckets, two of warm-up, three timed"


def test_the_lstm_is_the_papers():
    assert sum(exchange.LSTM) == SHAPES["lstm"]


def test_the_gradients_are_those_drawn_and_differ_from_step_to_step():
    model = exchange._Gradients((300, 200), "t3", 0, torch.device("cpu"))
    seen = []
    for step in range(2):
        model.zero_grad()
        model(step).backward()
        seen.append(torch.cat([weight.grad for weight in model.weights]))
    assert (torch.stack(seen) != 0).all()
    assert (seen[0] != seen[1]).all()
    assert seen[1][:300].tolist() == model._drawn[7919 : 7919 + 300].tolist()
    assert seen[1][300:].tolist() != model._drawn[7919 : 7919 + 200].tolist(), "nor do two parameters share one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elements", "x"], "--elements: 'x' is not a number of elements; write 26000000, 260k or 26M"),
        (["--compressors", "sidco"], "--compressors: 'sidco' is none of none, topk"),
        (["--ratios", "2"], "--ratios: '2' is not a number in (0, 1]; write 0.001"),
        (["--source", "normal"], "--source: 'normal' is none of laplace, t3, error-fed"),
        (["--repeats", "0"], "--repeats: '0' is not a whole number of at least 1"),
        (["--output", "no/such/x.json"], "--output: 'no/such/x.json' is in no existing folder; make 'no/such' first"),
        (["--device", "cpu", "--backend", "nccl"], "argument --backend: 'nccl' does not serve device 'cpu'"),
    ],
)
def test_errors_are_one_line_with_the_remedy(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["exchange", *arguments])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_it_is_documented():
    text = (Path(ROOT) / "docs" / "benchmarks.md").read_text()
    for option in (
        "--elements",
        "--compressors",
        "--ratios",
        "--source",
        "--repeats",
        "--warmup",
        "--note",
        "--output",
    ):
        assert f"`{option}`" in text
