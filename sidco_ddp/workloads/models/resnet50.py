"""ResNet-50, after He et al., "Deep Residual Learning" (2016): torchvision's, and narrower forms of it."""

from torch import nn

from sidco_ddp.workloads.models.resnet_small import init_convolutions

FULL_WIDTH = 64
_BLOCKS = (3, 4, 6, 3)  # by group; the first block of each but the first group halves the image


def resnet50(num_classes: int, width: int = FULL_WIDTH) -> nn.Module:
    """Class scores (batch, num_classes) of images (batch, 3, height, width).

    The full width is `torchvision.models.resnet50`: 25,557,032 parameters with 1,000 classes. The SIDCo paper's table
    has 25,559,081, which is this network with 1,001 outputs, one more than ImageNet has classes.

    Args:
        num_classes: how many outputs.
        width: channels of the first convolution; the others are in proportion.
    """
    from torchvision import models
    from torchvision.models.resnet import Bottleneck

    if width == FULL_WIDTH:
        full: nn.Module = models.resnet50(num_classes=num_classes)
        return full
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    ]
    inputs = width
    for group, blocks in enumerate(_BLOCKS):
        inside = width << group
        outputs = inside * Bottleneck.expansion
        for block in range(blocks):
            stride = 2 if group > 0 and block == 0 else 1
            shortcut = None
            if block == 0:
                shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            layers.append(Bottleneck(inputs, inside, stride, shortcut))
            inputs = outputs
    narrow = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
    init_convolutions(narrow)
    return narrow
