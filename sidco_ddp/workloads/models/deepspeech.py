"""A speech recogniser of convolutions and one-way LSTM layers, after Amodei et al., "Deep Speech 2" (2016)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


class DeepSpeech(nn.Module):
    """Two convolutions over frequency and time, LSTM layers, a convolution that looks ahead, and a linear layer.

    With 161 frequencies, 29 labels and the default sizes it has 43,476,256 parameters. Utterances of a batch are padded
    to one length, and what comes out for one does not depend on that: frames of padding are zeros in front of every
    convolution, and batch norm takes its statistics over the others alone.
    """

    def __init__(
        self,
        frequencies: int,
        labels: int,
        hidden: int = 1024,
        layers: int = 5,
        channels: int = 32,
        context: int = 20,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, kernel_size=(41, 11), stride=(2, 2), padding=(20, 5))
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=(21, 11), stride=(2, 1), padding=(10, 5))
        self.conv1_norm, self.conv2_norm = nn.BatchNorm1d(channels), nn.BatchNorm1d(channels)
        features = channels * ((frequencies + 3) // 4)
        self.lstms = nn.ModuleList(
            nn.LSTM(features if layer == 0 else hidden, hidden, batch_first=True) for layer in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in range(layers - 1))  # in front of all but the first
        self.context = context
        self.lookahead = nn.Conv1d(hidden, hidden, kernel_size=context + 1, groups=hidden, bias=False)
        self.head = nn.Sequential(nn.BatchNorm1d(hidden), nn.Linear(hidden, labels, bias=False))

    def forward(self, spectra: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of probabilities (batch, frames', labels) of (batch, frequencies, frames), and the new lengths.

        Both `lengths` are in frames, (batch,) int64; there are half as many frames', rounded up. What is beyond an
        utterance's length is zero.
        """
        spectra = spectra * _is_valid(lengths, spectra.shape[2])[:, None]
        images = self.conv1(spectra.unsqueeze(1))
        lengths = output_length(lengths)
        valid = _is_valid(lengths, images.shape[3])
        frames = _of_valid(lambda x: F.hardtanh(self.conv1_norm(x), 0.0, 20.0), images.permute(0, 3, 1, 2), valid)
        images = self.conv2(frames.permute(0, 2, 3, 1).contiguous())
        frames = _of_valid(lambda x: F.hardtanh(self.conv2_norm(x), 0.0, 20.0), images.permute(0, 3, 1, 2), valid)
        frames = self._recur(frames.flatten(2), lengths)
        ahead = self.lookahead(F.pad(frames.transpose(1, 2), (0, self.context)))
        frames = F.hardtanh(ahead, 0.0, 20.0).transpose(1, 2)
        return _of_valid(lambda x: F.log_softmax(self.head(x), dim=-1), frames, valid), lengths

    def _recur(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """The LSTM layers, over (batch, frames, features)."""
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        for layer, lstm in enumerate(self.lstms):
            if layer > 0:
                packed = PackedSequence(self.norms[layer - 1](packed.data), *packed[1:])
            packed, _ = lstm(packed)
        unpacked, _ = pad_packed_sequence(packed, batch_first=True, total_length=frames.shape[1])
        return unpacked


def output_length(frames: Tensor) -> Tensor:
    """How many frames come out for so many that go in."""
    return (frames + 1) // 2


def _is_valid(lengths: Tensor, frames: int) -> Tensor:
    """Whether each of so many frames is within the utterance: (batch, frames)."""
    return torch.arange(frames, device=lengths.device) < lengths[:, None]


def _of_valid(function: Callable[[Tensor], Tensor], frames: Tensor, valid: Tensor) -> Tensor:
    """`function` of all frames of (batch, frames, ...) that are no padding, as one batch; zeros for the others."""
    computed = function(frames[valid])
    return computed.new_zeros(*valid.shape, *computed.shape[1:]).masked_scatter(
        valid.reshape(*valid.shape, *(1,) * (computed.dim() - 1)), computed
    )
