"""Vectors with which estimators are tested: distributions, real gradients, and the shapes that break them."""

import functools

import torch
from torch import nn

D = torch.distributions


def _pareto(n, shape):
    return (torch.rand(n, dtype=torch.float64) ** -shape - 1).div(shape).float() * torch.randn(n).sign()


DISTRIBUTIONS = {
    "laplace": lambda n: D.Laplace(0.0, 1.0).sample((n,)),
    "normal": torch.randn,
    "gamma-0.3": lambda n: D.Gamma(0.3, 1.0).sample((n,)) * torch.randn(n).sign(),
    "gamma-0.6": lambda n: D.Gamma(0.6, 1.0).sample((n,)) * torch.randn(n).sign(),
    "pareto-0.3": lambda n: _pareto(n, 0.3),
    "pareto-0.45": lambda n: _pareto(n, 0.45),
    "lognormal-2": lambda n: torch.randn(n).mul(2).exp() * torch.randn(n).sign(),
    "student-t3": lambda n: D.StudentT(3.0).sample((n,)),
    "zeros-90": lambda n: torch.randn(n) * (torch.rand(n) < 0.1),
    "two-scales": lambda n: torch.where(torch.rand(n) < 0.01, 100 * torch.randn(n), torch.randn(n)),
    "two-scales-rare": lambda n: torch.where(torch.rand(n) < 0.0003, 1e4 * torch.randn(n), torch.randn(n)),
}

DEGENERATE = {
    "zeros": torch.zeros,
    "constant": lambda n: torch.full((n,), 0.5),
    "plus-minus": lambda n: 3 * torch.randn(n).sign(),
    "one-hot": lambda n: torch.eye(1, n)[0],
    "few-nonzeros": lambda n: torch.cat([torch.arange(1.0, 8.0)[: n // 2], torch.zeros(n)])[:n],
    "denormals": lambda n: torch.randn(n) * 1e-41,
    "equal-denormals": lambda n: torch.full((n,), 1e-42),
    "huge": lambda n: torch.randn(n).clamp(-8, 8) * 3e37,
    "all-scales": lambda n: 10 ** (76 * torch.rand(n) - 38),
    "two-values": lambda n: torch.where(torch.rand(n) < 0.0005, 7.0, 2.0),
    "three-values": lambda n: torch.randint(0, 3, (n,)).float(),
    "geometric-steps": lambda n: 2.0 ** -torch.randint(0, 100, (n,)).float(),
    "bfloat16-steps": lambda n: torch.randn(n).bfloat16().float(),
    "linear": lambda n: torch.arange(n).float(),
}


@functools.cache
def recorded_targets():
    """Targets (gradient + residual) of a real run: a small network on handwritten digits, top-k at 0.001."""
    datasets = __import__("pytest").importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(images).float() / 16, torch.tensor(labels)
    model = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    numel = sum(parameter.numel() for parameter in model.parameters())
    residual, targets = torch.zeros(numel), []
    for step in range(81):
        pick = torch.randint(0, len(images), (64,))
        loss = nn.functional.cross_entropy(model(images[pick]), labels[pick])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        target = residual + torch.cat([gradient.flatten() for gradient in gradients])
        if step % 20 == 0:
            targets.append(target.clone())
        kept = target.abs().topk(round(0.001 * numel)).indices
        residual, update = target.clone(), torch.zeros_like(target)
        residual[kept], update[kept] = 0, target[kept]
        with torch.no_grad():
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(model.parameters()) - 0.1 * update, model.parameters()
            )
    return targets
