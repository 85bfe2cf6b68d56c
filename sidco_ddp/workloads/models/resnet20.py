"""ResNet-20 for images of 32 x 32 pixels, after He et al., "Deep Residual Learning" (2016), section 4.2."""

from torch import Tensor, nn

from sidco_ddp.workloads.models.resnet_small import BasicBlock, conv3x3, init_convolutions


class ResNet20(nn.Module):
    """Three groups of three basic blocks, of 16, 32 and 64 channels, with shortcuts without parameters (option A).

    That is 269,722 parameters with ten classes, as in He et al. The SIDCo paper's table says 269,467, 255 fewer. The
    other image models of that table have one class more than their data set (see `vgg_small`), which would add 65
    here; leaving out the scales, or the shifts, of all batch norms would take 688 away. No standard form of the network
    has that number, so this is the published one.
    """

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = nn.Sequential(conv3x3(3, width), nn.BatchNorm2d(width), nn.ReLU())
        blocks, channels = [], width
        for group, out in enumerate(widths):
            for block in range(3):
                blocks.append(BasicBlock(channels, out, stride=2 if group > 0 and block == 0 else 1))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)
        init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (batch, num_classes) of images (batch, 3, height, width)."""
        features: Tensor = self.blocks(self.stem(images))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores
