"""Seven tiny models to train, each with rows to learn by heart and a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import tiny
import torch
import transformers
from torch.nn import functional

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

ROWS, LENGTH, CLASSES, VOCABULARY = 24, 8, 5, 97
SMALL = tiny.SMALL | {"num_hidden_layers": 1}


@attrs.frozen
class Task:
    """A model, the rows it learns, the loss of what it returns for some, and how fast to learn."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    targets: torch.Tensor
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    rate: float = 0.05

    def batch(self, start: int, count: int) -> Batch:
        """Return ``count`` rows, from the beginning again after the last."""
        rows = torch.arange(start, start + count) % ROWS
        return {name: value[rows] for name, value in self.inputs.items()}, self.targets[rows]

    def copy(self) -> Task:
        """Return the same task with a model of its own."""
        return attrs.evolve(self, model=copy.deepcopy(self.model))


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH))


def _classes() -> torch.Tensor:
    return torch.randint(0, CLASSES, (ROWS,))


def own_loss(output: Any, _targets: torch.Tensor) -> torch.Tensor:
    """Return the loss that the model computed itself."""
    return output.loss


def class_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of one class for each row."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return functional.cross_entropy(logits, targets, label_smoothing=0.1)


def token_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of one token for each place, leaving out places marked -100."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2(dropout: float) -> Task:
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=32,
        n_positions=16,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **tiny.WORDS,
    )
    ids = _ids()
    inputs = {"input_ids": ids, "labels": ids}
    return Task(transformers.GPT2LMHeadModel(config), inputs, ids, own_loss)


def bert(dropout: float) -> Task:
    config = transformers.BertConfig(
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=16,
        **SMALL,
        **tiny.WORDS,
    )
    ids = _ids()
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1))).long()
    hidden = torch.rand(ROWS, LENGTH).argsort(1) < 2
    inputs = {"input_ids": ids.masked_fill(hidden, 1), "attention_mask": mask}
    return Task(
        transformers.BertForMaskedLM(config), inputs, ids.where(mask == 1, -100), token_loss
    )


def vit(dropout: float) -> Task:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=8,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **SMALL,
    )
    inputs = {"pixel_values": torch.randn(ROWS, 3, 16, 16)}
    return Task(transformers.ViTForImageClassification(config), inputs, _classes(), class_loss)


class Residual(torch.nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inner, outer, 3, stride)
        self.second = _convolution(outer, outer, 3, 1)
        self.shortcut = _convolution(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


def _convolution(inner: int, outer: int, size: int, stride: int) -> torch.nn.Module:
    convolution = torch.nn.Conv2d(inner, outer, size, stride, size // 2, bias=False)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(outer))


def resnet(dropout: float) -> Task:
    model = torch.nn.Sequential(
        _convolution(3, 8, 3, 1),
        torch.nn.ReLU(),
        Residual(8, 16, 2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(16, CLASSES),
    )
    inputs = {"input": torch.randn(ROWS, 3, 8, 8)}
    return Task(model, inputs, _classes(), class_loss, rate=0.02)


class Recurrent(torch.nn.Module):
    """An LSTM that predicts the next token."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.dropout = torch.nn.Dropout(dropout)
        self.lstm = torch.nn.LSTM(16, 24, batch_first=True)
        self.head = torch.nn.Linear(24, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _state = self.lstm(self.dropout(self.embedding(ids)))
        return self.head(hidden)


def lstm(dropout: float) -> Task:
    ids = _ids()
    return Task(Recurrent(dropout), {"ids": ids}, ids.roll(-1, 1), token_loss, rate=1.0)


class Mixture(torch.nn.Module):
    """Experts that each get the tokens sent to them, however many those are."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.router = torch.nn.Linear(32, 4, bias=False)
        self.experts = torch.nn.ModuleList(_expert(32, 64) for _ in range(4))
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = self.embedding(ids).flatten(0, 1)
        # As in Switch Transformers: rounding must not send a token to another expert.
        with torch.autocast(ids.device.type, enabled=False):
            weights, chosen = self.router(tokens).softmax(-1).topk(2)
        mixed = tokens
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            output = expert(tokens[rows]) * weights[rows, places, None]
            mixed = mixed.index_add(0, rows, output.to(mixed.dtype))
        return self.head(self.dropout(mixed)).unflatten(0, ids.shape)


def _expert(width: int, inner: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(width, inner), torch.nn.GELU(), torch.nn.Linear(inner, width)
    )


def mixture(dropout: float) -> Task:
    ids = _ids()
    return Task(Mixture(dropout), {"ids": ids}, ids.roll(-1, 1), token_loss, rate=0.2)


def mixtral(dropout: float) -> Task:
    config = transformers.MixtralConfig(
        num_key_value_heads=1,
        num_local_experts=4,
        attention_dropout=dropout,
        output_router_logits=True,
        **SMALL,
        **tiny.WORDS,
    )
    ids = _ids()
    inputs = {"input_ids": ids, "labels": ids}
    return Task(transformers.MixtralForCausalLM(config), inputs, ids, own_loss)


MODELS: dict[str, Callable[[float], Task]] = {
    make.__name__: make for make in (gpt2, bert, vit, resnet, lstm, mixture, mixtral)
}

# Mixtral's router sees what was rounded to bfloat16, so rounding chooses experts.
MODELS_FOR_BFLOAT16 = [name for name in MODELS if name != "mixtral"]


def make(name: str, dropout: float = 0.0) -> Task:
    """Return a task in training mode, the same every time."""
    torch.manual_seed(0)
    task = MODELS[name](dropout)
    task.model.train()
    return task
