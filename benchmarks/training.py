"""Times a training step, and measures its memory: eager, torch.compile and torchbay take turns.

A step is forward, loss and backward, from gradients that are None. The optimizer is left out: it is
the same for all. Weights and data are random, so nothing is downloaded, and dropout is off. Before
a model is timed, every gradient is compared with eager in float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

# Before torch is imported: afterwards it has no effect.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import attrs
import torch
import transformers
from torch.nn import functional

import torchbay

Call = Callable[..., Any]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Gradients = dict[str, torch.Tensor]

OURS, THEIRS = "torchbay", "torch.compile"

WAYS: dict[str, Callable[[torch.nn.Module], Call]] = {
    "eager": lambda model: model,
    THEIRS: torch.compile,
    OURS: lambda m: torchbay.compile(m, backend="inductor_triton", fullgraph=True),
}

VOCABULARY = 2048
CLASSES = 10

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@attrs.frozen
class Task:
    """A model, a batch for it, the loss of what it returns, and how far gradients may be off."""

    model: torch.nn.Module
    inputs: Mapping[str, torch.Tensor]
    targets: torch.Tensor
    loss: Loss
    allowed: float = 1e-4

    def on(self, device: str) -> Task:
        """Return the task with its model and its batch on ``device``."""
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        model, targets = self.model.to(device), self.targets.to(device)
        return attrs.evolve(self, model=model, inputs=inputs, targets=targets)


def own_loss(output: Any, _targets: torch.Tensor) -> torch.Tensor:
    """Return the loss that the model computed itself."""
    loss: torch.Tensor = output.loss
    return loss


def cross_entropy(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of one class for each row, or for each token."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def gpt2() -> Task:
    """Return a GPT-2 of 4 layers at batch 4 and length 64."""
    config = transformers.GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=VOCABULARY)
    config.bos_token_id, config.eos_token_id = 1, 2
    return _language_model(transformers.GPT2LMHeadModel, config, 4, 64)


def gpt2_small() -> Task:
    """Return GPT-2 small at batch 8 and length 512."""
    return _language_model(transformers.GPT2LMHeadModel, transformers.GPT2Config(), 8, 512)


def mixtral() -> Task:
    """Return a Mixtral of 2 layers with 4 experts at batch 4 and length 64."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        num_local_experts=4,
        **SMALL | {"num_hidden_layers": 2, "intermediate_size": 512},
    )
    return _language_model(transformers.MixtralForCausalLM, config, 4, 64)


def _language_model(kind: Any, config: Any, batch: int, length: int) -> Task:
    config.use_cache = False
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    ids = torch.randint(3, config.vocab_size, (batch, length))
    return Task(kind(config), {"input_ids": ids, "labels": ids}, ids, own_loss)


def bert() -> Task:
    """Return a BERT of 4 layers at batch 4 and length 64, some of it padding."""
    config = transformers.BertConfig(vocab_size=VOCABULARY, **SMALL, **NO_DROPOUT)
    ids = torch.randint(3, VOCABULARY, (4, 64))
    mask = (torch.arange(64) < torch.tensor([[64], [60], [48], [40]])).long()
    model = transformers.BertForMaskedLM(config)
    targets = ids.where(mask == 1, -100)
    return Task(model, {"input_ids": ids, "attention_mask": mask}, targets, cross_entropy)


def vit() -> Task:
    """Return a ViT of 4 layers for 4 images of 64 patches."""
    config = transformers.ViTConfig(
        image_size=64, patch_size=8, num_labels=CLASSES, **SMALL, **NO_DROPOUT
    )
    inputs = {"pixel_values": torch.randn(4, 3, 64, 64)}
    targets = torch.randint(0, CLASSES, (4,))
    return Task(transformers.ViTForImageClassification(config), inputs, targets, cross_entropy)


class Residual(torch.nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inner, outer, 3, stride)
        self.second = _convolution(outer, outer, 3, 1)
        self.shortcut = _convolution(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what both ways add up to."""
        return functional.relu(self.second(functional.relu(self.first(x))) + self.shortcut(x))


def _convolution(inner: int, outer: int, size: int, stride: int) -> torch.nn.Module:
    convolution = torch.nn.Conv2d(inner, outer, size, stride, size // 2, bias=False)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(outer))


def resnet() -> Task:
    """Return a residual network of 9 convolutions for 16 images of 32 by 32."""
    model = torch.nn.Sequential(
        _convolution(3, 32, 3, 1),
        torch.nn.ReLU(),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        Residual(64, 128, 2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(128, CLASSES),
    )
    inputs = {"input": torch.randn(16, 3, 32, 32)}
    targets = torch.randint(0, CLASSES, (16,))
    # Rounding puts some value to the other side of a ReLU's zero.
    return Task(model, inputs, targets, cross_entropy, allowed=2e-2)


class Recurrent(torch.nn.Module):
    """An LSTM that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 256)
        self.lstm = torch.nn.LSTM(256, 256, batch_first=True)
        self.head = torch.nn.Linear(256, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what it takes the next tokens for."""
        hidden, _state = self.lstm(self.embedding(ids))
        logits: torch.Tensor = self.head(hidden)
        return logits


def lstm() -> Task:
    """Return an LSTM at batch 16 and length 16."""
    ids = torch.randint(0, VOCABULARY, (16, 16))
    return Task(Recurrent(), {"ids": ids}, ids.roll(-1, 1), cross_entropy)


MODELS: dict[str, dict[str, Callable[[], Task]]] = {
    "cpu": {
        "gpt2": gpt2,
        "bert": bert,
        "vit": vit,
        "resnet": resnet,
        "lstm": lstm,
        "mixtral": mixtral,
    },
    "cuda": {"gpt2-small": gpt2_small},
}


@attrs.frozen
class Contender:
    """One way to run a model, which has shown that its gradients are right."""

    way: str
    call: Call
    first_s: float
    error: float


@attrs.frozen
class Bench:
    """A task on its device, in its precision."""

    task: Task
    device: str
    bfloat16: bool

    def step(self, call: Call, precision: AbstractContextManager[Any] | None = None) -> None:
        """Compute the gradients of all parameters."""
        with precision or self.precision():
            loss = self.task.loss(call(**self.task.inputs), self.task.targets)
        loss.backward()

    def precision(self) -> AbstractContextManager[Any]:
        """Return autocast as it is asked for."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16)

    def forget_gradients(self) -> None:
        """Set every gradient to None, and wait until the device is idle."""
        self.task.model.zero_grad(set_to_none=True)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def gradients(self, call: Call, precision: AbstractContextManager[Any] | None = None) -> Any:
        """Return the gradients of one step, by name."""
        self.forget_gradients()
        self.step(call, precision)
        named = self.task.model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    def milliseconds(self, call: Call) -> float:
        """Return what one step takes."""
        # With one thread, processor time is what a step takes on a machine that nobody shares.
        clock = time.process_time if self.device == "cpu" else time.perf_counter
        self.forget_gradients()
        started = clock()
        self.step(call)
        self.synchronize()
        return (clock() - started) * 1e3

    def peak_bytes(self, call: Call) -> int:
        """Return the most memory that one step adds to what was there before it."""
        self.forget_gradients()
        if self.device == "cuda":
            return _cuda_peak(lambda: self.step(call))
        return _cpu_peak(lambda: self.step(call))


def _cuda_peak(step: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def _cpu_peak(step: Callable[[], None]) -> int:
    """Add up what PyTorch's allocator reports to the profiler."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    assert profile.kineto_results is not None
    reports = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    reports.sort(key=lambda report: report.start_ns())
    return max(accumulate(report.nbytes() for report in reports))


def error_of(found: Gradients, expected: Gradients) -> float:
    """Return how far the worst gradient is off, as a part of its norm.

    Some are zero but for rounding: a thousandth of the norm of all together counts as theirs.
    """
    if found.keys() != expected.keys():
        message = f"these have a gradient on one side only: {found.keys() ^ expected.keys()}"
        raise RuntimeError(message)
    floor = 1e-3 * torch.stack([value.norm() for value in expected.values()]).norm()
    offs = (
        (found[name] - value).norm() / (value.norm() + floor) for name, value in expected.items()
    )
    return float(torch.stack(list(offs)).max())


def contenders(bench: Bench, ways: Sequence[str]) -> Iterator[Contender]:
    """Compile the model in each of ``ways``, and check its gradients."""
    model = bench.task.model
    expected = bench.gradients(model, torch.autocast(bench.device, enabled=False))
    inherent = error_of(bench.gradients(model), expected)
    allowed = 2 * inherent + (2**-7 if bench.bfloat16 else bench.task.allowed)
    for way in ways:
        call = WAYS[way](model)
        started = time.perf_counter()
        for _ in range(3):
            error = error_of(bench.gradients(call), expected)
            if not error <= allowed:
                message = f"gradients of {way} are off by {error:.1e}; allowed: {allowed:.1e}"
                raise RuntimeError(message)
        yield Contender(way, call, time.perf_counter() - started, error)


@attrs.frozen
class Spread:
    """The median and the quartiles over all rounds."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of ``values``."""
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.lower:.2f}-{self.upper:.2f}]"


@attrs.frozen
class Row:
    """One model, measured."""

    model: str
    first_s: dict[str, float]
    errors: dict[str, float]
    ms: dict[str, Spread]
    ratios: dict[str, Spread]
    peak_bytes: dict[str, int]


def measure(name: str, arguments: argparse.Namespace) -> Row:
    """Compile a model in every way, check it, and let all take turns."""
    # Dynamo looks through what it compiled of one code object: each model starts with none.
    torch.compiler.reset()
    torchbay.reset()
    torch.manual_seed(0)
    task = MODELS[arguments.device][name]().on(arguments.device)
    task.model.train()
    bench = Bench(task, arguments.device, arguments.dtype == "bfloat16")
    sides = list(contenders(bench, arguments.ways))
    with collector_off():
        times = take_turns(bench, sides, arguments.rounds)
        peaks = {s.way: bench.peak_bytes(s.call) for s in sides} if arguments.memory else {}
    return Row(
        name,
        {side.way: side.first_s for side in sides},
        {side.way: side.error for side in sides},
        {way: Spread.of(seen) for way, seen in times.items()},
        ratios(times),
        peaks,
    )


def take_turns(bench: Bench, sides: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each side in each round, after one round to warm up."""
    times: dict[str, list[float]] = {side.way: [] for side in sides}
    for number in range(rounds + 1):
        first = number % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            times[side.way].append(bench.milliseconds(side.call))
    return {way: seen[1:] for way, seen in times.items()}


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """Return torchbay's time as a part of each other's: turns of one round met the same load."""
    ours = times.get(OURS)
    if ours is None:
        return {}
    return {
        way: Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)])
        for way, theirs in times.items()
        if way != OURS
    }


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector out of the figures."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def print_times(rows: Sequence[Row]) -> None:
    """Print what a step takes, as a Markdown table."""
    ways = list(rows[0].ms)
    others = list(rows[0].ratios)
    print("\nmilliseconds per step, and torchbay's as a part of each other's: median [quartiles]\n")
    print_row(["model", *ways, *(f"ratio to {way}" for way in others)])
    print_row(["---", *["--:"] * (len(ways) + len(others))])
    for row in rows:
        print_row([row.model, *map(str, row.ms.values()), *map(str, row.ratios.values())])


def print_memory(rows: Sequence[Row]) -> None:
    """Print the memory that a step adds at its peak, as a Markdown table."""
    ways = list(rows[0].peak_bytes)
    others = [way for way in ways if way != OURS] if OURS in ways else []
    print("\nMiB that a step adds at its peak, and torchbay's as a part of each other's\n")
    print_row(["model", *ways, *(f"ratio to {way}" for way in others)])
    print_row(["---", *["--:"] * (len(ways) + len(others))])
    for row in rows:
        peaks = row.peak_bytes
        parts = [f"{peaks[OURS] / peaks[way]:.3f}" for way in others]
        print_row([row.model, *(f"{peak / 2**20:.2f}" for peak in peaks.values()), *parts])


def print_row(cells: Sequence[str]) -> None:
    """Print one row of a Markdown table."""
    print(f"| {' | '.join(cells)} |")


def parse() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=MODELS, default="cpu")
    parser.add_argument("--models", nargs="+", help="default: all of the device")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 is autocast")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default: 15)")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    known = MODELS[arguments.device]
    arguments.models = arguments.models or list(known)
    if unknown := set(arguments.models) - set(known):
        parser.error(f"no such models on {arguments.device}: {', '.join(sorted(unknown))}")
    if arguments.dtype is None:
        arguments.dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    return arguments


def main() -> None:
    """Measure every model and print the tables."""
    arguments = parse()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        row = measure(name, arguments)
        rows.append(row)
        seen = (f"{way} {s:.0f} s, off by {row.errors[way]:.0e}" for way, s in row.first_s.items())
        print(f"{name}, first 3 steps: {'; '.join(seen)}", flush=True)
    print_times(rows)
    if arguments.memory:
        print_memory(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
