"""A language model of word embeddings and LSTM layers, after Zaremba et al., "RNN Regularization" (2014)."""

from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Embeddings, LSTM layers of the same width, and a linear decoder of its own weights (not tied), with bias.

    A vocabulary of 10,000 words, 1,500 units and two layers make 66,034,000 parameters. Dropout acts on all that goes
    up, from the embeddings to the decoder, and on nothing that goes from step to step. All parameters are drawn evenly
    from -`init_range` to `init_range`.
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float, init_range: float) -> None:
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init_range, init_range)

    def forward(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        """Scores (batch, steps, vocabulary) of the word after each of (batch, steps), and the state after the last.

        A state is the outputs and the cells, (layers, batch, hidden) each.
        """
        outputs, (hidden, cells) = self.lstm(self.dropout(self.embedding(words)), state)
        scores: Tensor = self.decoder(self.dropout(outputs))
        return scores, (hidden, cells)

    def initial_state(self, batch: int) -> State:
        """The state before the first word: zeros, (layers, batch, hidden) each."""
        weight = self.decoder.weight
        return (weight.new_zeros(self.layers, batch, self.hidden), weight.new_zeros(self.layers, batch, self.hidden))
