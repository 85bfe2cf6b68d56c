"""VGG-16 for images of 32 x 32 pixels, after Simonyan and Zisserman, "Very Deep Convolutional Networks" (2015)."""

from torch import Tensor, nn

from sidco_ddp.workloads.models.resnet_small import init_convolutions

_CONVOLUTIONS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, and how many before the image is halved


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions, then two linear layers of 512 inputs.

    Each convolution is followed by a batch norm that learns a shift, which takes the place of the convolution's bias,
    and no scale: the parameters are as many as without batch norm, but it can be trained from scratch. With eleven
    classes they are 14,982,987, the number in the SIDCo paper's table: like its ImageNet models, with 1,001 classes, it
    has one class more than the data. Here there are ten, and 14,982,474 parameters.
    """

    def __init__(self, num_classes: int = 10, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for channels, repeats in _CONVOLUTIONS:
            outputs = channels * width // 64
            for _ in range(repeats):
                layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), _shift(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Dropout(), nn.Linear(inputs, num_classes))
        init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (batch, num_classes) of images (batch, 3, 32, 32)."""
        scores: Tensor = self.head(self.features(images).flatten(1))
        return scores


def _shift(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    norm.weight.requires_grad_(False)
    return norm
