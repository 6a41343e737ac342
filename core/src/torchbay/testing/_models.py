"""Twenty small models of plain ``torch.nn``, one for each idea that real ones are made of."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torchbay.testing._groups import Case, Groups, selected
from torchbay.testing._subject import Subject

__all__ = ["MODELS", "ModelTests"]


class Residual(nn.Module):
    """Adds what a module computes to its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return x + self.inner(x)


class Recurrent(nn.Module):
    """Returns the output and the last state of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, state = self.layer(x)
        return output, state[0] if isinstance(state, tuple) else state


class CausalAttention(nn.Module):
    """Attends to earlier positions only, in two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class RotaryAttention(nn.Module):
    """Rotates queries and keys by their position before they meet."""

    speed: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.register_buffer("speed", 0.1 ** torch.arange(width // 2))

    def forward(self, x: Tensor) -> Any:
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * self.speed
        query, key = (self._rotated(part(x), angle) for part in (self.query, self.key))
        return (query @ key.transpose(1, 2)).softmax(-1) @ x

    def _rotated(self, x: Tensor, angle: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class GatedBlock(nn.Module):
    """Normalizes by the root mean square and feeds forward through a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 24), nn.Linear(width, 24)
        self.down = nn.Linear(24, width)

    def forward(self, x: Tensor) -> Any:
        normal = self.norm(x)
        return x + self.down(functional.silu(self.gate(normal)) * self.up(normal))


class TiedLanguageModel(nn.Module):
    """Reads and writes words with one table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(6, 8)
        self.block = CausalAttention(8)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Any:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        return self.norm(x + self.block(x)) @ self.words.weight.t()


class BagClassifier(nn.Module):
    """Averages the vectors of the words that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Any:
        is_word = (tokens != 0).unsqueeze(-1)
        mean = (self.words(tokens) * is_word).sum(1) / is_word.sum(1).clamp(min=1)
        return self.head(mean).log_softmax(-1)


class Experts(nn.Module):
    """Weighs the two best of four experts for each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        best, chosen = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros_like(x[:, :4]).scatter(1, chosen, best)
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights.unsqueeze(-1) * answers).sum(1)


class TinyUNet(nn.Module):
    """Goes down, comes up, and remembers the way."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Any:
        deep = functional.relu(self.down(x))
        return self.out(torch.cat([x, self.up(deep)], 1))


class GraphConvolution(nn.Module):
    """Averages over neighbours in a graph given by its edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Any:
        total = torch.zeros_like(x).index_add(0, target, self.linear(x)[source])
        ones = torch.ones_like(target, dtype=x.dtype)
        count = torch.zeros_like(x[:, 0]).index_add(0, target, ones)
        return total / count.clamp(min=1).unsqueeze(-1)


class Distance(nn.Module):
    """Compares two inputs in a space of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(width, 6), nn.Tanh())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.into(x), self.into(y)
        return (left - right).square().sum(-1).sqrt(), functional.cosine_similarity(left, right)


class Autoencoder(nn.Module):
    """Returns a reconstruction and its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(width, 3), nn.GELU())
        self.decode = nn.Linear(3, width)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = self.decode(self.encode(x))
        return {"seen": seen, "loss": functional.mse_loss(seen, x)}


Inputs = tuple[Tensor, ...]
_ROWS, _STEPS, _IMAGE, _SIGNAL = (4, 8), (2, 5, 8), (2, 2, 8, 8), (2, 4, 12)


def _tokens() -> Tensor:
    return torch.arange(10).reshape(2, 5) * 7 % 20


def _edges() -> Inputs:
    return torch.randn(_ROWS), torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 2, 3, 0, 2])


def _of(*sizes: int) -> Callable[[], Inputs]:
    return lambda: (torch.randn(*sizes),)


def _norm(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), layer, nn.ReLU())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
        _of(*_ROWS),
    ),
    "autoencoder": (lambda: Autoencoder(8), _of(*_ROWS)),
    "siamese distance": (lambda: Distance(8), lambda: (torch.randn(_ROWS), torch.randn(_ROWS))),
    "mixture of experts": (lambda: Experts(8), _of(*_ROWS)),
    "graph convolution": (lambda: GraphConvolution(8), _edges),
    "bag of words": (BagClassifier, lambda: (_tokens(),)),
    "language model with tied weights": (TiedLanguageModel, lambda: (_tokens(),)),
    "causal attention": (lambda: CausalAttention(8), _of(*_STEPS)),
    "rotary attention": (lambda: RotaryAttention(8), _of(*_STEPS)),
    "gated block": (lambda: GatedBlock(8), _of(*_STEPS)),
    "transformer encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        _of(*_STEPS),
    ),
    "LSTM": (lambda: Recurrent(nn.LSTM(8, 5, batch_first=True)), _of(*_STEPS)),
    "GRU": (lambda: Recurrent(nn.GRU(8, 5, batch_first=True)), _of(*_STEPS)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        ),
        _of(*_IMAGE),
    ),
    "residual block with batch norm": (
        lambda: Residual(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
        ).eval(),
        _of(*_IMAGE),
    ),
    "batch norm in training mode": (lambda: _norm(nn.BatchNorm2d(4)).train(), _of(*_IMAGE)),
    "group norm": (lambda: _norm(nn.GroupNorm(2, 4)), _of(*_IMAGE)),
    "U-Net": (TinyUNet, _of(*_IMAGE)),
    "super resolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, groups=2),
            nn.PixelShuffle(2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
        ),
        _of(*_IMAGE),
    ),
    "temporal convolutions": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 4, 3, padding=2, dilation=2), nn.Hardswish(), nn.AdaptiveAvgPool1d(3)
        ),
        _of(*_SIGNAL),
    ),
}
"""Name -> what makes the model, and what makes its inputs."""


def _case(name: str, device: torch.device) -> Case:
    make_model, make_inputs = MODELS[name]
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = make_model().to(device)
        inputs = tuple(tensor.to(device) for tensor in make_inputs())
    return Case(module=model, inputs=inputs, truth=copy.deepcopy(model).double())


class ModelTests:
    """One test for each model; several share a graph."""

    family = "models"

    @pytest.fixture(scope="class")
    def model_results(self, request: pytest.FixtureRequest, subject: Subject) -> Groups:
        """Return what the backend makes of the models that are to run."""
        makers = {
            name: functools.partial(_case, name, subject.device)
            for name in selected(request, "model")
        }
        return Groups(subject, makers, size=7)

    @pytest.mark.parametrize("model", MODELS)
    def test_model(self, model_results: Groups, model: str) -> None:
        """Computes a model, and what it writes to its buffers, as PyTorch does.

        `Backend.compile`: "Compile ``request.graph``."
        """
        model_results.check(model)
