"""Times a model's steady state: eager, torch.compile, and torchbay's backends, taking turns.

Weights are random, so nothing is downloaded. Every row is checked against eager before it is
timed. On CUDA a turn is timed with events around a block of calls, on the CPU with a clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported: afterwards it has no effect.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import torchbay

WAYS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "eager": lambda model: model,
    "torch.compile": torch.compile,
    "torch.compile reduce-overhead": lambda m: torch.compile(m, mode="reduce-overhead"),
    "torchbay inductor_triton": lambda m: torchbay.compile(m, backend="inductor_triton"),
    "torchbay inductor_triton reduce-overhead": lambda m: torchbay.compile(
        m, backend="inductor_triton", mode="reduce-overhead"
    ),
    "torchbay aoti": lambda m: torchbay.compile(m, backend="aoti"),
}


def gpt2(layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return GPT-2 small, or as many of its layers as asked, at batch 1 and length 128."""
    config = transformers.GPT2Config(n_layer=layers, use_cache=False)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 50257, (1, 128))}


def bert(layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return BERT-base, or as many of its layers as asked, at batch 8 and length 128."""
    config = transformers.BertConfig(num_hidden_layers=layers)
    return transformers.BertModel(config), {"input_ids": torch.randint(0, 30522, (8, 128))}


MODELS = {"gpt2": gpt2, "bert": bert}


def block_milliseconds(call: Callable[[], Any], count: int, device: str) -> float:
    """Return the milliseconds one of ``count`` calls takes."""
    if device == "cpu":
        started = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - started) / count * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of a model's output."""
    return next(iter(output.values()))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile every way, check it, and time all of them in turns."""
    torch.manual_seed(0)
    model, inputs = MODELS[arguments.model](arguments.layers)
    model = model.eval().to(arguments.device)
    inputs = {key: value.to(arguments.device) for key, value in inputs.items()}
    expected = first_tensor(model(**inputs))
    rows, calls = [], {}
    for name in arguments.ways:
        compiled = WAYS[name](model)
        started = time.perf_counter()
        for _ in range(4):
            result = first_tensor(compiled(**inputs)).clone()
        error = (result - expected).abs().max().item()
        rows.append({"way": name, "first_s": time.perf_counter() - started, "error": error})
        calls[name] = lambda compiled=compiled: compiled(**inputs)
        print(f"{name}: compiled in {rows[-1]['first_s']:.1f} s, off by {error:.1e}", flush=True)
    turns = {name: [] for name in calls}
    for _ in range(arguments.turns):
        for name, call in calls.items():
            turns[name].append(block_milliseconds(call, arguments.block, arguments.device))
    for row in rows:
        times = sorted(turns[row["way"]])
        row |= {"ms": statistics.median(times), "low": times[0], "high": times[-1]}
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with torch.no_grad():
        rows = measure(arguments)
    for row in rows:
        spread = f"[{row['low']:.2f}-{row['high']:.2f}]"
        print(f"{row['way']:42s} {row['ms']:8.2f} ms {spread:16s} off by {row['error']:.1e}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
