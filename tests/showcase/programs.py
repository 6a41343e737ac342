"""Eleven small programs, written as people write them, that torch.compile makes no right graph of.

Each comes with several sets of inputs: sizes are the same, what the program decides by is not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

__all__ = ["PROGRAMS", "Program"]

log = logging.getLogger(__name__)
log.setLevel(logging.WARNING)


@attrs.frozen
class Program:
    """A program and what to call it with.

    Attributes:
        title: What the table calls it.
        make: Makes it, in the same state every time.
        inputs: Makes the set of inputs of a number.
        paths: How many ways through the program these sets of inputs take, at most.
        rehearsals: How many further calls show that Python state moves in the same way each time.
        tolerance: How far off results may be, because fused or in-place operators round otherwise.
    """

    title: str
    make: Callable[[], Callable[..., Any]]
    inputs: Callable[[int], tuple[Any, ...]]
    paths: int = 1
    rehearsals: int = 0
    tolerance: float = 0.0

    def sets(self, count: int = 5) -> list[tuple[Any, ...]]:
        """Return sets of inputs, the same ones every time."""
        return [_seeded(number, self.inputs, number) for number in range(count)]

    def fresh(self) -> Callable[..., Any]:
        """Return the program as it is before its first call."""
        return _seeded(0, self.make)


def _seeded(seed: int, make: Callable[..., Any], *args: Any) -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return make(*args)


LENGTHS = ((9, 4, 7, 2), (5, 9, 9, 1), (9, 4, 7, 2), (3, 3, 9, 8), (9, 9, 9, 9))
"""How long the sentences of each batch are; the first and the third agree."""


def sentences(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded tokens and their lengths."""
    lengths = torch.tensor(LENGTHS[number])
    tokens = torch.randint(1, 50, (4, 9))
    return tokens.masked_fill(torch.arange(9) >= lengths[:, None], 0), lengths


class LSTMClassifier(nn.Module):
    """Classifies sequences by the last hidden states of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.dropout = nn.Dropout(0.3)
        self.classifier = nn.Linear(24, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        last = torch.cat((hidden[-2], hidden[-1]), dim=1)
        return self.classifier(self.dropout(last))


class PackedGRU(nn.Module):
    """Encodes sentences of different lengths without running over their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=0)
        self.gru = nn.GRU(8, 12, batch_first=True, bidirectional=True)
        self.attention = nn.Linear(24, 1)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        embedded = self.embedding(tokens)
        packed = pack_padded_sequence(
            embedded, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        packed_outputs, hidden = self.gru(packed)
        outputs, kept = pad_packed_sequence(packed_outputs, batch_first=True)
        scores = self.attention(outputs).squeeze(-1)
        padding = torch.arange(outputs.shape[1])[None] >= kept[:, None]
        weights = scores.masked_fill(padding, float("-inf")).softmax(dim=1)
        return (weights[..., None] * outputs).sum(dim=1), hidden


class SentenceEncoder(nn.Module):
    """Encodes sentences with a transformer that must not look at padding.

    In inference PyTorch's encoder drops padding and returns zeros there, which the mean counts on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(9, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens) + self.positions
        encoded = self.encoder(embedded, src_key_padding_mask=tokens == 0)
        return encoded.mean(dim=1)


def newton_root(coefficients: torch.Tensor, start: torch.Tensor, tol: float = 1e-6) -> torch.Tensor:
    """Return where cubic polynomials are zero, by Newton's iteration."""
    a, b, c, d = coefficients
    x = start
    err = torch.full((), float("inf"))
    while err > tol:
        value = ((a * x + b) * x + c) * x + d
        slope = (3 * a * x + 2 * b) * x + c
        step = value / slope
        x = x - step
        err = step.abs().max()
    return x


def cubics(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return monotonic cubics, and starting points nearer or farther from their zeros."""
    coefficients = torch.rand(4, 6) + torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    return coefficients, torch.full((6,), (0.0, 3.0, 0.5, 30.0, 3.0)[number])


class BeamDecoder(nn.Module):
    """Decodes with a small beam and stops as soon as every hypothesis has ended."""

    END = 0

    def __init__(self, beams: int = 3, longest: int = 12) -> None:
        super().__init__()
        self.beams, self.longest = beams, longest
        self.embedding = nn.Embedding(8, 16)
        self.cell = nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 8)

    def forward(self, context: torch.Tensor, eagerness: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = context.expand(self.beams, -1)
        tokens = torch.ones(self.beams, dtype=torch.long)
        scores = torch.tensor([0.0] + [float("-inf")] * (self.beams - 1))
        done = torch.zeros(self.beams, dtype=torch.bool)
        history = []
        for _ in range(self.longest):
            hidden = self.cell(self.embedding(tokens), hidden)
            logits = self.head(hidden)
            logits[:, self.END] += eagerness
            log_probs = logits.log_softmax(dim=-1)
            ended = torch.full_like(log_probs, float("-inf"))
            ended[:, self.END] = 0.0
            log_probs = torch.where(done[:, None], ended, log_probs)
            scores, chosen = (scores[:, None] + log_probs).view(-1).topk(self.beams)
            beam = chosen // log_probs.shape[-1]
            tokens = chosen % log_probs.shape[-1]
            hidden, done = hidden[beam], done[beam] | (tokens == self.END)
            history = [*(step[beam] for step in history), tokens]
            if done.all():
                break
        return torch.stack(history, dim=1), scores


def contexts(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what to decode from, and how eager to end the hypotheses are."""
    return torch.randn(1, 16), torch.tensor((0.5, 4.0, 1.5, 4.0, -9.0)[number])


class LoggingBlock(nn.Module):
    """Logs what passes, when somebody wants to know."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log.debug("input of shape %s on %s", tuple(x.shape), x.device)
        y = x + self.linear(self.norm(x)).relu()
        if log.isEnabledFor(logging.DEBUG):
            log.debug("mean %.3f, largest %.3f", y.mean().item(), y.abs().max().item())
        log.info("done")
        return y


class SharedProjection(nn.Module):
    """Projects with weights that a trainer in another thread may be replacing."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 4)
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            projected = self.projection(x)
        return nn.functional.normalize(projected, dim=-1)


class RecurrentPolicy(nn.Module):
    """A policy that remembers its hidden state from one observation to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.actor = nn.Linear(8, 3)
        self.hidden: torch.Tensor | None = None

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        features = self.encoder(observation).tanh()
        output, self.hidden = self.gru(features[:, None], self.hidden)
        return self.actor(output[:, -1]).softmax(dim=-1)


class Expert(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class MixtureOfExperts(nn.Module):
    """Sends each token to its two best experts, and leaves idle experts out."""

    def __init__(self, width: int = 8, experts: int = 4, active: int = 2) -> None:
        super().__init__()
        self.active = active
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, 16) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.view(-1, shape[-1])
        weights, indices = self.gate(x).softmax(dim=-1).topk(self.active, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=len(self.experts)).tolist()
        for number, expert in enumerate(self.experts):
            if counts[number] == 0:
                continue
            token, place = torch.where(indices == number)
            y[token] += expert(x[token]) * weights[token, place, None]
        return y.view(shape)


class DetectionLoss(nn.Module):
    """The losses of a detector: classes of all labelled anchors, boxes of the positive ones."""

    def forward(
        self, logits: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        labelled = labels >= 0
        positive = labels > 0
        class_loss = nn.functional.cross_entropy(logits[labelled], labels[labelled])
        if positive.any():
            box_loss = nn.functional.smooth_l1_loss(boxes[positive], targets[positive])
        else:
            box_loss = boxes.sum() * 0.0
        hits = logits[labelled].argmax(dim=-1) == labels[labelled]
        return {"class": class_loss, "box": box_loss, "accuracy": hits.float().mean()}


def anchors(number: int) -> tuple[torch.Tensor, ...]:
    """Return predictions and labels; -1 means ignored, 0 background."""
    labels = torch.randint(-1, 4, (20,))
    if number == 3:
        labels = labels.clamp(max=0)
    return torch.randn(20, 4), torch.randn(20, 4), labels, torch.randn(20, 4)


class LennardJones(nn.Module):
    """Energy and forces of particles in a periodic box, over pairs within a cutoff."""

    def __init__(self, cutoff: float = 2.5) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.epsilon = nn.Parameter(torch.tensor(1.0))
        self.sigma = nn.Parameter(torch.tensor(1.0))

    def neighbours(
        self, positions: torch.Tensor, box: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pairs within the cutoff, and the vectors between their particles."""
        first, second = torch.triu_indices(len(positions), len(positions), offset=1)
        apart = positions[second] - positions[first]
        apart = apart - box * torch.round(apart / box)
        near = (apart.square().sum(dim=-1) < self.cutoff**2).nonzero().squeeze(-1)
        return torch.stack((first[near], second[near])), apart[near]

    def forward(self, positions: torch.Tensor, box: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs, apart = self.neighbours(positions, box)
        if pairs.shape[1] == 0:
            return positions.new_zeros(()), torch.zeros_like(positions)
        squared = apart.square().sum(dim=-1)
        sixth = (self.sigma**2 / squared) ** 3
        energies = 4 * self.epsilon * (sixth**2 - sixth)
        pull = 24 * self.epsilon * (2 * sixth**2 - sixth) / squared
        forces = torch.zeros_like(positions)
        forces.index_add_(0, pairs[1], pull[:, None] * apart)
        forces.index_add_(0, pairs[0], -pull[:, None] * apart)
        return energies.sum(), forces


def particles(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a slightly shaken lattice, more or less dense."""
    axis = torch.arange(3.0)
    lattice = torch.cartesian_prod(axis, axis, axis)
    spacing = (1.1, 1.4, 1.8, 3.5, 1.6)[number]
    return lattice * spacing + 0.05 * torch.randn(27, 3), torch.full((3,), 3 * spacing)


def _tokens(number: int) -> tuple[torch.Tensor, ...]:
    return sentences(number)[:1]


def _floats(*shape: int) -> Callable[[int], tuple[torch.Tensor]]:
    return lambda _number: (torch.randn(shape),)


PROGRAMS = (
    Program("LSTM classifier", lambda: LSTMClassifier().eval(), _tokens),
    Program("GRU on packed sequences", PackedGRU, sentences, paths=4, tolerance=1e-6),
    Program(
        "TransformerEncoder with a padding mask",
        lambda: SentenceEncoder().eval(),
        _tokens,
        tolerance=1e-5,
    ),
    Program("Newton's iteration, `while err > tol`", lambda: newton_root, cubics, paths=5),
    Program("beam search that exits early", lambda: BeamDecoder().eval(), contexts, paths=5),
    Program("logging at a disabled level", LoggingBlock, _floats(4, 8)),
    Program("forward that takes a lock", SharedProjection, _floats(4, 8)),
    Program("hidden state stored on `self`", RecurrentPolicy, _floats(2, 6), rehearsals=1),
    Program("mixture of experts, `.tolist()`", MixtureOfExperts, _floats(2, 7, 8), paths=5),
    Program("boolean-mask losses", DetectionLoss, anchors, paths=2),
    Program("neighbour list of a physics model", LennardJones, particles, paths=2),
)
