"""Models and loops of many shapes, each with its loss; the same code runs on a plain module and under DDP."""

from abc import ABC, abstractmethod

import torch
from checks import Branches
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 24


class Shape(ABC):
    """A model and the loss that its loop computes. ``loss`` sees the model through ``call``: DDP, or the module itself.

    Attributes:
        unused: some parameters are not reached by some rank in some step.
        steady: the same parameters are reached in the same order in every step, as ``static_graph`` wants.
        dtypes: those it can be cast to; empty where it brings its own.
    """

    unused = False
    steady = True
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

    @abstractmethod
    def build(self):
        """The model."""

    def loss(self, call, x, rank, step):
        return call(x).float().square().mean()


class Equal(Shape):
    def build(self):
        return Branches(WIDTH)


class Tied(Shape):
    """Input embedding and output layer are one parameter."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(40, WIDTH, padding_idx=0)
            self.hidden = nn.Linear(WIDTH, WIDTH)
            self.output = nn.Linear(WIDTH, 40, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, x):
            tokens = (x.float().abs() * 7).long() % 40
            return self.output(torch.tanh(self.hidden(self.embedding(tokens).sum(1))))

    def build(self):
        return self.Model()


class Shared(Shape):
    """One layer, applied three times."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x):
            for _ in range(3):
                x = torch.tanh(self.layer(x))
            return self.head(x)

    def build(self):
        return self.Model()


class Recurrent(Shape):
    dtypes = (torch.float32, torch.float64)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 10, num_layers=2, batch_first=True)
            self.head = nn.Linear(10, 3)

        def forward(self, x):
            return self.head(self.lstm(x.view(len(x), -1, 4))[0][:, -1])

    def build(self):
        return self.Model()


class Heads(Shape):
    """Several heads; which of them is used depends on rank and step, and one is never used by anybody."""

    unused, steady = True, False

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(WIDTH, WIDTH)
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(4))

        def forward(self, x, head):
            return self.heads[head](torch.tanh(self.trunk(x)))

    def build(self):
        return self.Model()

    def loss(self, call, x, rank, step):
        return call(x, (rank + step) % 3).float().square().mean()


class LowRank(Shape):
    """A frozen base with small trainable factors, one of which starts at zero."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    def build(self):
        return self.Model()


class Penalty(Shape):
    """The loss contains the gradient with respect to the input."""

    dtypes = (torch.float32, torch.float64)

    def build(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1, bias=False))

    def loss(self, call, x, rank, step):
        x = x.clone().requires_grad_()
        out = call(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


class Recomputed(Shape):
    """Activations are computed again in the backward."""

    class Model(Branches):
        def forward(self, x):
            x = checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=False)
            return self.head(checkpoint(lambda y: torch.tanh(self.second(y)) + self.third(y), x, use_reentrant=False))

    def build(self):
        return self.Model(WIDTH)


class NoData(Shape):
    """Some rank's batch is empty in some steps."""

    def build(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6))

    def loss(self, call, x, rank, step):
        return call(x[:0] if (rank + step) % 2 else x).float().square().sum()


class Functional(Shape):
    """The layer is called with tensors made from its parameters."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            made = {name: parameter * self.scale for name, parameter in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, made, (x,))

    def build(self):
        return self.Model()


class MixedDtypes(Shape):
    """A bucket for each of three dtypes."""

    dtypes = ()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH).bfloat16()
            self.b = nn.LayerNorm(WIDTH)
            self.c = nn.Linear(WIDTH, 5).double()

        def forward(self, x):
            return self.c(self.b(self.a(x.bfloat16()).float()).double())

    def build(self):
        return self.Model()


class Complex(Shape):
    dtypes = ()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.cfloat)
            self.b = nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.b(self.a(x.to(torch.cfloat)).abs())

    def build(self):
        return self.Model()


class OddSizes(Shape):
    """Parameters of one element, of none, and a convolution with batch normalisation."""

    dtypes = (torch.float32, torch.float64)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)
            self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0))

        def forward(self, x):
            return self.norm(self.conv(x.view(len(x), 3, -1))) * self.scale + self.nothing.sum()

    def build(self):
        return self.Model()


SHAPES = {
    shape.__name__: shape()
    for shape in (
        Equal,
        Tied,
        Shared,
        Recurrent,
        Heads,
        LowRank,
        Penalty,
        Recomputed,
        NoData,
        Functional,
        MixedDtypes,
        Complex,
        OddSizes,
    )
}
