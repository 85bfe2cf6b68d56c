"""VGG-19, after Simonyan and Zisserman, "Very Deep Convolutional Networks" (2015): torchvision's, and narrower."""

import math

import torch
from torch import nn

FULL_WIDTH = 64
_CONVOLUTIONS = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))  # channels / width, and how many before the image is halved
_HIDDEN = 64  # units of a hidden linear layer / width
_GAIN = 1 / (0.5 - 0.5 / math.pi)  # the variance of a ReLU's input over that of its output
_GRID = 7  # the linear layers see so many places in each direction, whatever the size of the image


def vgg19(num_classes: int, width: int = FULL_WIDTH) -> nn.Module:
    """Class scores (batch, num_classes) of images (batch, 3, height, width).

    The full width is `torchvision.models.vgg19`, without batch norm: 143,667,240 parameters with 1,000 classes. The
    SIDCo paper's table has 143,671,337, which is this network with 1,001 outputs, one more than ImageNet has classes.

    Narrower forms start from weights of their own: those of a unit sum to zero and keep the size of the signal from
    layer to layer. What all images have in common is thus not passed on: without that, and without batch norm,
    nineteen narrow layers give nearly the same features for every image, and hardly train.

    Args:
        num_classes: how many outputs.
        width: channels of the first convolution; the others, and the hidden linear layers, are in proportion.
    """
    if width == FULL_WIDTH:
        from torchvision import models

        full: nn.Module = models.vgg19(num_classes=num_classes)
        return full
    layers: list[nn.Module] = []
    inputs = 3
    for multiple, repeats in _CONVOLUTIONS:
        for _ in range(repeats):
            layers += [nn.Conv2d(inputs, multiple * width, kernel_size=3, padding=1), nn.ReLU()]
            inputs = multiple * width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(_GRID), nn.Flatten()]
    inputs *= _GRID**2
    for _ in range(2):
        layers += [nn.Linear(inputs, _HIDDEN * width), nn.ReLU(), nn.Dropout()]
        inputs = _HIDDEN * width
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            _init(layer)
    scores = nn.Linear(inputs, num_classes)
    nn.init.normal_(scores.weight, std=0.01)
    nn.init.zeros_(scores.bias)
    return nn.Sequential(*layers, scores)


@torch.no_grad()
def _init(layer: nn.Conv2d | nn.Linear) -> None:
    weight = layer.weight
    nn.init.normal_(weight, std=(_GAIN / weight[0].numel()) ** 0.5)
    weight -= weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
