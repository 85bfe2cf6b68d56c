"""k̂/k of the published SIDCo beside this package's on known distributions, as the markdown tables of docs/algorithm.md.

    python docs/tables/estimator_quality.py

Every run makes CALLS calls on fresh samples: the stage count starts at 1 and adapts as it would in training.
There is no error feedback here, so that the distribution is the one that the row names.
"""

import platform
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sidco_ddp import make_compressor

NUMEL = 400_000
CALLS = 60
COUNTED = 20  # last calls, over which the published method is judged: its stage count has had 40 to adapt
RATIOS = (0.1, 0.01, 0.001, 0.0001)
SCHEMES = ("sidco-e", "sidco-p", "sidco-gp")
FIXED_STAGES = (1, 2, 3, 4, 6, 8, 10)
PUBLISHED = {"stage_rule": "paper", "bounded": False}


def signed(magnitudes: Tensor) -> Tensor:
    """``magnitudes`` with random signs."""
    return magnitudes * (2 * torch.randint(0, 2, magnitudes.shape) - 1)


def generalized_pareto(numel: int, shape: float) -> Tensor:
    """Samples of the generalized Pareto distribution of scale 1, by its quantile function."""
    return ((torch.rand(numel, dtype=torch.float64) ** -shape - 1) / shape).float()


DISTRIBUTIONS: dict[str, Callable[[int], Tensor]] = {
    "Laplace": lambda n: torch.distributions.Laplace(0.0, 1.0).sample((n,)),
    "normal": torch.randn,
    "gamma(0.3)": lambda n: signed(torch.distributions.Gamma(0.3, 1.0).sample((n,))),
    "gamma(0.6)": lambda n: signed(torch.distributions.Gamma(0.6, 1.0).sample((n,))),
    "generalized Pareto(0.3)": lambda n: signed(generalized_pareto(n, 0.3)),
    "generalized Pareto(0.45)": lambda n: signed(generalized_pareto(n, 0.45)),
    "lognormal(σ = 2)": lambda n: signed(torch.randn(n).mul(2).exp()),
    "Student t3": lambda n: torch.distributions.StudentT(3.0).sample((n,)),
    "90 % zeros, rest normal": lambda n: torch.randn(n) * (torch.rand(n) < 0.1),
    "99 % normal(1), 1 % normal(100)": lambda n: torch.randn(n) * torch.where(torch.rand(n) < 0.01, 100.0, 1.0),
}


class Run(NamedTuple):
    """What the calls of one compressor gave."""

    sent: list[float]  # k̂/k by call
    raw: list[float]  # the same before the correction
    rounds: list[int]  # stages and correction rounds by call
    touched: list[float]  # elements read, as a multiple of all, by call
    stages: int  # M at the end


def measure(scheme: str, ratio: float, samples: Sequence[Tensor], **options: object) -> Run:
    """Compress ``samples`` one after the other."""
    # cold: samples are fresh, and a warm start would show the last sample's threshold instead of the estimate
    compressor = make_compressor(scheme, ratio=ratio, warm_start=False, **options)
    k = compressor.target_count(NUMEL)
    state = compressor.init(NUMEL)
    sent, raw, rounds, touched = [], [], [], []
    for vector in samples:
        payload, state = compressor.compress(vector, state)
        sent.append(payload.count / k)
        raw.append(state.report.raw_count / k)
        rounds.append(state.report.rounds)
        touched.append(state.report.touched / NUMEL)
    return Run(sent, raw, rounds, touched, state.stages.current)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def quality(samples: Sequence[Tensor], ratio: float) -> tuple[list[str], list[Run]]:
    """The cells of a row of the first table, and our own runs behind them."""
    cells, runs = [], []
    for scheme in SCHEMES:
        published = measure(scheme, ratio, samples, **PUBLISHED)
        last = published.sent[-COUNTED:]
        ours = measure(scheme, ratio, samples)
        cells.append(f"{min(last):.2f} / {mean(last):.2f} / {max(last):.2f}, M = {published.stages}")
        cells.append(f"{min(ours.sent):.2f} .. {max(ours.sent):.2f}")
        runs.append(ours)
    return cells, runs


def effort(runs: Sequence[Run]) -> list[str]:
    """The cells of a row of the second table."""
    return [
        f"{mean(run.rounds):.1f} / {max(run.rounds)}, {mean(run.touched):.1f} d / {max(run.touched):.1f} d"
        for run in runs
    ]


def chaining(samples: Sequence[Tensor], rule: str) -> list[str]:
    """The cells of a row of the third table."""
    runs = (measure("sidco-e", 0.001, samples, stages=m, stage_rule=rule, bounded=False) for m in FIXED_STAGES)
    return [f"{mean(run.raw):.2f}" for run in runs]


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    print(f"\n{title}\n")
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(row) + " |")


def main() -> None:
    """Print the environment and the tables."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    qualities, efforts, chains = [], [], []
    for seed, (name, sample) in enumerate(DISTRIBUTIONS.items()):
        torch.manual_seed(seed)
        samples = [sample(NUMEL) for _ in range(CALLS)]
        for ratio in RATIOS:
            cells, runs = quality(samples, ratio)
            qualities.append([name, f"{ratio:g}", *cells])
            if ratio == 0.001:
                efforts.append([name, *effort(runs)])
        chains += [
            [name, tails, *chaining(samples[:5], rule)]
            for tails, rule in (("nominal", "paper"), ("measured", "learned"))
        ]
    torch_version, seconds = torch.__version__.split("+")[0], time.perf_counter() - started
    print(f"torch {torch_version}, {platform.machine()} CPU, 1 thread; {NUMEL:,} elements; {seconds:.0f} s.")
    pairs = [f"`{scheme}` {method}" for scheme in SCHEMES for method in ("published", "ours")]
    show("Quality", ["distribution", "ratio", *pairs], qualities)
    show("Effort", ["distribution", *(f"`{scheme}`" for scheme in SCHEMES)], efforts)
    show("Chaining", ["distribution", "tails", *(f"M = {m}" for m in FIXED_STAGES)], chains)


if __name__ == "__main__":
    main()
