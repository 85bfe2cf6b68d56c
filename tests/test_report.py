"""``sidco-ddp report``: what it measures by hand-made runs, what a pack keeps, the pictures, and how it says no."""

import importlib.util
import json
from itertools import accumulate

import numpy as np
import pytest

from sidco_ddp.tools.cli import main
from sidco_ddp.tools.report.comparison import compare
from sidco_ddp.tools.report.digest import POINTS, digest, elapsed_seconds, spread
from sidco_ddp.tools.report.packs import load
from sidco_ddp.tools.report.records import read_run

CONFIG = {"task": "toy", "scale": "small", "world_size": 2, "batch_size": 4, "total_steps": 4, "device": "cpu"}


def make_run(folder, compressor, ratio=0.01, *, metrics=((3.0, 0.5), (6.0, 0.9)), seconds=1.0, khat=None, **others):
    """A run of 4 steps by default, with evaluations at even intervals: pairs of elapsed seconds and metric."""
    config = {**CONFIG, "compressor": compressor, "ratio": ratio, "seed": others.pop("seed", 0)}
    config |= {"log_dir": str(folder.parent), "quiet": True, "data_dir": "here", "recipe": {"of": "/somewhere/else"}}
    config |= others.pop("config", {})
    khat = [None if compressor == "none" else 1.0] * 4 if khat is None else khat
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    steps = [
        {
            "step": number,
            "epoch": 1,
            "loss": 1.0 / number,
            "khat_over_k": value,
            "bytes_sent": 100 if compressor == "none" else 20,
            "dense_bytes": 100,
            "compress_seconds": 0.25 * seconds,
            "exchange_seconds": 0.125 * seconds,
            "step_seconds": seconds,
            **others.get("step", {}),
        }
        for number, value in enumerate(khat, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    evaluations = [
        {"step": len(steps) * (place + 1) // len(metrics), "metric_name": "accuracy", "metric": metric, "seconds": when}
        for place, (when, metric) in enumerate(metrics)
    ]
    evaluations = [{**evaluation, **others.get("evaluation", {})} for evaluation in evaluations]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    if others.get("complete", True):
        summary = {"seconds": metrics[-1][0] + 0.5, "higher_is_better": True, **others.get("summary", {})}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def report(*paths, **options):
    runs, _ = load(paths)
    return compare(runs, **options)


def row(comparison, name):
    return next(found for found in comparison["runs"] if found["name"] == name)


def text_of(arguments, capsys):
    assert main(["report", *map(str, arguments), "--no-figures"]) == 0
    return capsys.readouterr().out


def refuse(arguments, capsys):
    """The one line of an error."""
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, arguments)])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, "one line"
    assert err.startswith("sidco-ddp report: error: ")
    return err


@pytest.fixture
def runs(tmp_path):
    """A baseline and three schemes, whose measures are known."""
    folder = tmp_path / "runs"
    make_run(folder / "dense", "none")
    khat = [0.8, 1.0, 1.2, 1.0]
    make_run(folder / "fast", "sidco-e", metrics=((2.0, 0.6), (4.0, 0.95)), seconds=0.5, khat=khat)
    make_run(folder / "early", "topk", metrics=((5.0, 0.9), (9.0, 0.8)), seconds=2.0)
    make_run(folder / "never", "dgc", 0.001, metrics=((1.0, 0.3), (2.0, 0.899)), seconds=0.25)
    return folder


def test_speedup_is_the_baselines_time_to_the_target_over_the_runs(runs):
    (found,) = report(runs)
    assert (found["target"], found["baseline"]["seconds_to_target"]) == (0.9, 6.0)
    speedups = {found["name"]: found["speedup"] for found in found["runs"]}
    assert speedups == {"dense": 1.0, "fast": 6 / 4, "early": 6 / 5, "never": 0.0}, "reached once is reached"
    assert row(found, "fast")["seconds_to_target"] == 4.0
    assert row(found, "early")["steps_to_target"] == 2
    assert row(found, "never")["seconds_to_target"] is None
    (lower,) = report(runs, target=0.55)
    assert row(lower, "fast")["speedup"] == 6 / 2
    assert row(lower, "never")["speedup"] == 6 / 2


def test_a_metric_that_falls_reaches_its_target_from_above(tmp_path):
    down = {"summary": {"higher_is_better": False}}
    make_run(tmp_path / "dense", "none", metrics=((3.0, 200.0), (6.0, 100.0)), **down)
    make_run(tmp_path / "below", "topk", metrics=((2.0, 99.0), (6.0, 101.0)), **down)
    make_run(tmp_path / "above", "dgc", metrics=((2.0, 150.0), (6.0, 101.0)), **down)
    (found,) = report(tmp_path)
    assert (row(found, "below")["speedup"], row(found, "above")["speedup"]) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("name", "up"), [("perplexity", False), ("error_rate", False), ("accuracy", True), ("glossary", True)]
)
def test_records_that_do_not_say_which_way_is_up_go_by_the_metrics_name(tmp_path, name, up):
    make_run(tmp_path / "run", "none", complete=False, evaluation={"metric_name": name})
    assert digest(read_run(tmp_path / "run"))["higher_is_better"] is up


def test_throughput_is_samples_over_the_time_of_the_steps(runs):
    (found,) = report(runs)
    assert row(found, "dense")["samples_per_second"] == 8.0, "2 ranks with 4 samples each in a second"
    throughput = {found["name"]: found["throughput"] for found in found["runs"]}
    assert throughput == {"dense": 1.0, "fast": 2.0, "early": 0.5, "never": 4.0}


def test_estimation_quality_and_its_intervals(runs):
    (found,) = report(runs)
    quality = row(found, "fast")["khat_over_k"]
    half = 1.6448536269514722 * (0.08 / 3) ** 0.5 / 4**0.5
    assert quality["mean"] == pytest.approx(1.0)
    assert quality["ci90"] == pytest.approx([1.0 - half, 1.0 + half])
    assert (quality["p5"], quality["p95"]) == pytest.approx((0.83, 1.17))
    assert (quality["min"], quality["max"]) == (0.8, 1.2)
    assert row(found, "dense")["khat_over_k"] is None
    assert row(found, "fast")["reduction"] == 5.0
    assert spread([None, 2.0])["std"] is None, "one step has no interval"
    assert spread([None]) is None


def test_steps_that_were_not_compressed_do_not_count(tmp_path):
    make_run(tmp_path / "dense", "none")
    make_run(tmp_path / "warm", "topk", khat=[None, None, 0.5, 1.0])
    (found,) = report(tmp_path)
    assert row(found, "warm")["khat_over_k"]["count"] == 2
    assert row(found, "warm")["khat_over_k"]["mean"] == 0.75


def test_time_split_has_a_dash_for_what_an_old_run_did_not_record(tmp_path, capsys):
    make_run(tmp_path / "old", "none")
    make_run(tmp_path / "new", "topk", step={"data_seconds": 0.003, "compute_seconds": 0.02, "optimizer_seconds": 0.5})
    (found,) = report(tmp_path)
    assert row(found, "old")["seconds_per_step"]["data"] is None
    expected = {"data": 0.003, "compute": 0.02, "compress": 0.25, "exchange": 0.125, "optimizer": 0.5, "step": 1.0}
    assert row(found, "new")["seconds_per_step"] == expected
    lines = text_of([tmp_path], capsys).split("Milliseconds of a step, means:")[1].splitlines()
    assert lines[4].split() == ["none", "-", "0", "-", "-", "250", "125", "-", "1,000"]
    assert lines[5].split() == ["topk", "0.01", "0", "3.00", "20.0", "250", "125", "500", "1,000"]


def test_several_baselines_are_their_median(tmp_path, capsys):
    for seed, (metric, when, seconds) in enumerate([(0.90, 6.0, 1.0), (0.80, 8.0, 2.0), (0.95, 7.0, 4.0)]):
        make_run(tmp_path / f"dense{seed}", "none", metrics=((1.0, 0.1), (when, metric)), seconds=seconds, seed=seed)
    make_run(tmp_path / "run0", "topk", metrics=((1.0, 0.1), (3.5, 0.91)))
    make_run(tmp_path / "run1", "topk", metrics=((1.0, 0.1), (3.5, 0.71)), seed=1)
    (found,) = report(tmp_path)
    assert found["target"] == 0.90
    assert found["baseline"]["seconds_to_target"] == 7.0, "of 6, never, and 7"
    assert found["baseline"]["samples_per_second"] == 4.0
    assert row(found, "run0")["speedup"] == 2.0
    (scheme,) = [scheme for scheme in found["schemes"] if scheme["compressor"] == "topk"]
    assert scheme["seeds"] == [0, 1]
    assert scheme["metric"] == {"mean": pytest.approx(0.81), "min": 0.71, "max": 0.91}
    assert (scheme["reached"], scheme["speedup"]) == (1, {"mean": 1.0, "min": 0.0, "max": 2.0})
    out = text_of([tmp_path], capsys)
    assert "baseline none, median of 3 runs" in out
    assert "0.81, 0.71 .. 0.91      1/2" in out


def test_of_two_baselines_the_worse_metric_is_the_target_so_that_both_reach_it(tmp_path):
    make_run(tmp_path / "dense0", "none", metrics=((6.0, 0.9),))
    make_run(tmp_path / "dense1", "none", metrics=((8.0, 0.8),), seed=1)
    (found,) = report(tmp_path)
    assert (found["target"], found["baseline"]["seconds_to_target"]) == (0.8, 7.0)


def test_target_that_the_baseline_was_given_comes_before_its_final_metric(tmp_path):
    make_run(tmp_path / "dense", "none", summary={"target": 0.5, "target_seconds": 3.0})
    make_run(tmp_path / "run", "topk", metrics=((1.5, 0.7), (4.0, 0.6)))
    (found,) = report(tmp_path)
    assert (found["target"], row(found, "run")["speedup"]) == (0.5, 2.0)


def test_without_a_baseline_at_the_target_there_is_no_speedup(runs):
    (found,) = report(runs, target=0.94)
    assert {row["speedup"] for row in found["runs"]} == {None}
    assert any("baseline does not reach" in note for note in found["notes"])


def test_baseline_can_be_any_run_by_path_or_name(runs, capsys):
    by_path = text_of([runs, "--baseline", runs / "early"], capsys)
    assert by_path == text_of([runs, "--baseline", "early"], capsys)
    assert "baseline topk 0.01" in by_path
    assert "target accuracy at least 0.8 " in by_path
    outside = text_of([runs / "fast", "--baseline", runs / "dense"], capsys)
    assert "baseline none" in outside
    assert "\nnone " in outside, "and it is shown"


def test_tasks_scales_and_world_sizes_are_compared_apart(runs, capsys):
    for number, config in enumerate([{"task": "other"}, {"scale": "large"}, {"world_size": 4}]):
        make_run(runs / f"dense-{number}", "none", config=config)
    titles = {(found["task"], found["scale"], found["world_size"]): len(found["runs"]) for found in report(runs)}
    assert titles == {("toy", "small", 2): 4, ("other", "small", 2): 1, ("toy", "large", 2): 1, ("toy", "small", 4): 1}
    out = text_of([runs], capsys)
    for title in ("toy (small) on 2 ranks", "other (small) on 2 ranks", "toy (large) on 2 ranks", "on 4 ranks"):
        assert title in out


def test_runs_that_differ_in_more_than_the_scheme_are_said_to(runs):
    other = {"device": "cuda:0", "recipe": {"momentum": 0.5}, "versions": {"torch": "9"}}
    make_run(runs / "cuda", "topk", config=other, seed=1)
    (found,) = report(runs)
    assert found["notes"] == ["the runs differ in device: cpu, cuda:0", "the runs differ in momentum: 0.5, None"]


def test_a_killed_run_counts_as_far_as_it_came(runs, capsys):
    make_run(runs / "killed", "topk", seed=1, complete=False, metrics=((5.0, 0.7),), khat=[1.0, 1.0, 1.0])
    with open(runs / "killed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    assert main(["report", str(runs), "--no-figures"]) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert str(runs / "killed" / "metrics.jsonl") in err
    assert "line 4 is cut off" in err
    assert "killed was broken off after 3 of 4 steps" in out
    assert " 3/4 " in out
    (found,) = report(runs)
    assert row(found, "killed")["seconds"] == 3.0


def test_a_run_that_goes_on_from_a_checkpoint_is_said_to(runs, capsys):
    folder = make_run(runs / "rest", "topk", metrics=((20.0, 0.7), (30.0, 0.95)), seconds=2.0, seed=1)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        (folder / name).write_text("".join(json.dumps({**line, "step": line["step"] + 100}) + "\n" for line in lines))
    (found,) = report(runs)
    assert found["notes"] == ["rest goes on from a checkpoint: what came before step 101 is not in it"]
    assert row(found, "rest")["speedup"] == 6 / 30
    assert digest(read_run(folder))["curves"]["seconds"] == [18.0, 20.0, 22.0, 24.0]


def test_a_killed_run_has_what_its_config_says(tmp_path):
    config = {"higher_is_better": False, "target": 7.0}
    run = digest(read_run(make_run(tmp_path / "run", "none", complete=False, config=config)))
    assert (run["higher_is_better"], run["target"]) == (False, 7.0)


def test_seconds_of_a_step_follow_the_clock_of_the_evaluations():
    steps = [{"step": number, "step_seconds": 1.0} for number in range(1, 6)]
    evaluations = [{"step": 2, "seconds": 3.0}, {"step": 4, "seconds": 7.0}]
    assert elapsed_seconds(steps, evaluations).tolist() == [1, 2, 4, 5, 8]


def test_curves_are_thinned_and_smoothed(tmp_path):
    values = [1.0 + (number % 2) for number in range(1001)]
    run = digest(read_run(make_run(tmp_path / "long", "topk", khat=values, seconds=0.5)))
    curves = run["curves"]
    assert len(curves["step"]) == POINTS
    assert curves["step"][-1] == 1001
    assert curves["window"] == 20
    gaps = [right - left for left, right in zip(curves["step"], curves["step"][1:], strict=False)]
    assert set(gaps) == {6, 7}
    assert curves["loss"][-1] == pytest.approx(sum(1 / n for n in range(982, 1002)) / 20, rel=1e-5)
    assert set(curves["khat_over_k"][20:]) == {1.5}
    assert (set(curves["khat_over_k_min"]), set(curves["khat_over_k_max"])) == ({1.0}, {2.0})
    assert run["khat_over_k"]["mean"] == sum(values) / 1001
    longer = digest(read_run(make_run(tmp_path / "longer", "topk", khat=[1.0] * 6000)))["curves"]
    assert longer["window"] == 40, "as far as from point to point"


def test_numbers_that_are_not_finite_do_no_harm(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "dense", "none")
    make_run(tmp_path / "lost", "topk", metrics=((1.0, None), (2.0, None)), step={"loss": None})
    (found,) = report(tmp_path)
    assert row(found, "lost")["speedup"] == 0.0
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sidco_ddp.tools.report.figures.DPI", 20)
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("style", ["text", "markdown", "json"])
def test_a_pack_gives_the_same_report(runs, tmp_path, capsys, style):
    make_run(runs / "killed", "redsync", complete=False, evaluation={"metrics": {"top5": 0.7}, "bytes_sent": 40})
    pack = tmp_path / "pack.json"
    direct = text_of([runs, "--pack", pack, "--format", style], capsys)
    assert text_of([pack, "--format", style], capsys) == direct
    assert text_of([pack, runs, runs / "fast", "--format", style], capsys) == direct, "each run once"
    written = pack.read_text()
    assert str(tmp_path) not in written, "no path of the machine"
    assert "somewhere" not in written
    assert "here" not in written
    assert json.loads(written)["runs"][0]["config"]["total_steps"] == 4
    if style == "json":
        assert json.loads(direct)["comparisons"][0]["target"] == 0.9


def test_a_pack_gives_the_same_pictures(runs, tmp_path, capsys):
    """Tables and pictures are made of these digests and of nothing else."""
    make_run(runs / "lost", "topk", metrics=((1.0, None), (2.0, None)), step={"loss": None}, seed=1)
    text_of([runs, "--pack", tmp_path / "pack.json"], capsys)
    assert load([tmp_path / "pack.json"])[0] == load([runs])[0]


def test_a_pack_is_small(tmp_path, capsys):
    rough = np.random.default_rng(0).uniform(0.5, 1.5, 5_000).tolist()
    folder = make_run(tmp_path / "long", "topk", khat=rough, metrics=[(float(n), n / 40) for n in range(1, 31)])
    pack = tmp_path / "pack.json"
    text_of([folder, "--baseline", folder, "--pack", pack], capsys)
    assert pack.stat().st_size < 15_000 < (folder / "metrics.jsonl").stat().st_size / 25


@pytest.mark.parametrize("many", [False, True])
def test_pictures_are_there_and_not_blank(runs, tmp_path, capsys, monkeypatch, many):
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setattr("sidco_ddp.tools.report.figures.DPI", 60)  # half of it, for speed
    if many:  # a column for each ratio
        for ratio in (0.1, 0.01, 0.001):
            for seed, name in enumerate(["topk", "sidco-p", "sidco-p", "redsync"]):
                make_run(runs / f"{name}-{ratio}-{seed}", name, ratio, seed=seed, khat=[0.0, 0.5, 5.0, 30.0])
    out = tmp_path / "a" / "b"
    assert main(["report", str(runs), "--output", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "toy-small-2ranks-curves.png",
        "toy-small-2ranks-measures.png",
    ]
    assert sorted(capsys.readouterr().err.split()) == sorted(map(str, out.iterdir()))
    for path in out.iterdir():
        with open(path, "rb") as file:
            grey = image.imread(file)[:, :, :3].mean(axis=2)
        height, width = grey.shape
        assert width >= 600
        assert height >= 250
        assert 0.005 < (grey < 0.5).mean() < 0.5, path
        margins = np.concatenate([grey[:3].ravel(), grey[-3:].ravel(), grey[:, :3].ravel(), grey[:, -3:].ravel()])
        assert (margins == 1.0).all(), "nothing is cut"


def test_markdown(runs, capsys):
    lines = text_of([runs, "--format", "markdown"], capsys).splitlines()
    header = next(place for place, line in enumerate(lines) if line.startswith("| compressor"))
    assert lines[header + 1].startswith("| --- | ---: |")
    assert {line.count("|") for line in lines[header : header + 6]} == {15}
    assert lines[header + 4].startswith("| dgc | 0.001 | 0 | 0.899 | 4 | 2.5 | - | 0.00 | 4.00 | 1.000 [")


def test_matplotlib_is_missed_before_anything_else_and_not_needed_for_tables(runs, tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    line = refuse([runs, "--output", tmp_path / "out"], capsys)
    assert "matplotlib is missing; pip install 'sidco_ddp[bench]', or give --no-figures" in line
    assert not (tmp_path / "out").exists()
    assert "speed-up" in text_of([runs], capsys)


def broken(folder, name, text):
    (folder / "dense" / name).write_text(text)
    return [folder]


def write(path, text):
    path.write_text(text)
    return path


LINE = '{"step": 1}'
ERRORS = {
    "nowhere": (lambda f: [f / "nowhere"], "runs/nowhere' does not exist; name a folder that train.py made, or a pack"),
    "empty folder": (lambda f: [(f / "void").mkdir() or f / "void"], "void' is no run and holds none: no config.json"),
    "empty run": (lambda f: broken(f, "metrics.jsonl", ""), "dense' is an empty run: no step is in its metrics.jsonl"),
    "bad config": (lambda f: broken(f, "config.json", "{"), "config.json is not the JSON that train.py writes"),
    "foreign config": (lambda f: broken(f, "config.json", "{}"), "config.json has no 'task'; it is not what train.py"),
    "bad line": (lambda f: broken(f, "metrics.jsonl", f"x\n{LINE}\n"), "metrics.jsonl, line 1 is not the JSON"),
    "foreign line": (lambda f: broken(f, "metrics.jsonl", LINE), "metrics.jsonl, line 1 has no 'loss'"),
    "no steps file": (lambda f: [(f / "dense/metrics.jsonl").unlink() or f / "dense"], "cannot be read (No such file"),
    "no config": (lambda f: [(f / "dense/config.json").unlink() or f / "dense"], "config.json' cannot be read"),
    "no evaluation": (lambda f: broken(f, "evaluations.jsonl", ""), "on 2 ranks ends without a metric; give --target"),
    "no baseline": (
        lambda f: [f / "fast"],
        "no run without compression ('none') of toy (small) on 2 ranks; add",
    ),
    "no pack": (lambda f: [write(f / "p.json", "[]")], "p.json' is no pack; name a run folder, or a file that --pack"),
    "format": (
        lambda f: [write(f / "p.json", '{"format": 9, "runs": []}')],
        "has format 9, this reads 1; pack",
    ),
    "empty pack": (lambda f: [write(f / "p.json", '{"format": 1, "runs": []}')], "p.json' holds no run"),
    "target": (lambda f: [f, "--target", "much"], "--target: 'much' is not a number"),
    "pack folder": (lambda f: [f, "--pack", f / "no/p.json"], "p.json' is in no existing folder; make "),
    "pack is a folder": (lambda f: [f, "--pack", f], "--pack: "),
    "output": (lambda f: [f, "--output", write(f / "file", "")], "file' cannot be made (File exists); name another"),
    "schemes": (
        lambda f: [f, "--baseline", f],
        "several schemes (dgc 0.001, none, sidco-e 0.01, topk 0.01)",
    ),
    "other task": (
        lambda f: [f, "--baseline", make_run(f.parent / "other", "none", config={"task": "other"})],
        "'other' is a run of other (small) on 2 ranks, to be compared are toy (small) on 2 ranks; name a baseline of",
    ),
    "metrics": (
        lambda f: [
            f,
            make_run(f.parent / "b", "none", config={"task": "b"}, evaluation={"metric_name": "loss"}),
            "--target",
            "0.5",
        ],
        "--target is one value for accuracy and loss; report on one task at a time",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_with_the_path_and_the_remedy(runs, tmp_path, capsys, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, message = ERRORS[case]
    line = refuse(arguments(runs), capsys)
    assert message in line
    assert line.rstrip().endswith("(see sidco-ddp report --help)")


def test_elapsed_seconds_of_the_first_epoch_are_the_steps_own():
    steps = [{"step": number, "step_seconds": number / 2} for number in range(1, 5)]
    assert elapsed_seconds(steps, []).tolist() == list(accumulate([0.5, 1.0, 1.5, 2.0]))
