"""A residual network of a few layers for small images, after He et al., "Deep Residual Learning" (2016)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size of the image, or divides it by `stride`."""
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)


def init_convolutions(model: nn.Module) -> None:
    """Draw the weights of all convolutions as He et al. do for networks of rectified linear units."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut without parameters.

    Where the shape changes, the shortcut drops pixels and adds channels of zeros (the paper's option A). A 1x1
    convolution would do as well, but its gradient has other strides than DDP's buckets, and DDP warns of the copy.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride, self.added_channels = stride, out_channels - in_channels
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = conv3x3(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to (batch, out_channels, height / stride, width / stride)."""
        y = torch.relu(self.bn1(self.conv1(x)))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added_channels))
        return torch.relu(self.bn2(self.conv2(y)) + shortcut)


class SmallResNet(nn.Module):
    """One basic block a width, each but the first halving the image; then the mean over pixels and a linear layer.

    The defaults give 297,450 parameters with one input channel and ten classes.
    """

    def __init__(self, in_channels: int, num_classes: int, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv3x3(in_channels, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU())
        inputs = (widths[0], *widths[:-1])
        self.blocks = nn.Sequential(
            *(BasicBlock(i, o, stride=1 if n == 0 else 2) for n, (i, o) in enumerate(zip(inputs, widths, strict=True)))
        )
        self.head = nn.Linear(widths[-1], num_classes)
        init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (batch, num_classes) of images (batch, in_channels, height, width)."""
        features: Tensor = self.blocks(self.stem(images))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores
