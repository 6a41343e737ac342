"""Measures what a call costs around a backend that does nothing.

Each case is compiled by torchbay and by torch.compile with one backend function, whose result
returns the same tuple on every call. What is left is the cost of getting there: finding the
specialization, checking its guards, collecting the inputs. The floor is a plain Python function
that returns the constant. All three run in one process, in short blocks that take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before torch is imported: afterwards it has no effect.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs
import torch

import torchbay

WIDTH = 16
BLOCK_SECONDS = 0.002
OUTPUT = torch.zeros(1, WIDTH)
CONSTANT = (OUTPUT,)

Call = Callable[[torch.Tensor], Any]


def constant_backend(_graph: torch.fx.GraphModule, _example_inputs: Sequence[Any]) -> Call:
    """Compile nothing: whatever the inputs, the outputs are the same objects."""
    return lambda *_inputs: CONSTANT


def floor(*_args: Any) -> torch.Tensor:
    """Do what is left when nothing is checked."""
    return OUTPUT


def double(x: torch.Tensor) -> torch.Tensor:
    """Be the plain function with one tensor."""
    return x * 2


def linears(count: int) -> torch.nn.Module:
    """Return a module with ``count`` Linear, hence twice as many parameters."""
    layers = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(count))
    return torch.nn.Sequential(*layers).eval()


@attrs.frozen
class Case:
    """What is compiled, and the largest ratio to torch.compile it is meant to have."""

    name: str
    make: Callable[[], Callable[..., Any]]
    target: float | None = None


CASES = (
    Case("function, 1 tensor", lambda: double, target=1 / 4),
    Case("module, 1 Linear", lambda: linears(1)),
    Case("module, 10 Linear", lambda: linears(10)),
    Case("module, 100 Linear", lambda: linears(100), target=1 / 2),
)


@attrs.frozen
class Spread:
    """Microseconds per call over all blocks."""

    median: float
    least: float
    p90: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.least:.2f}-{self.p90:.2f}]"


@attrs.frozen
class Row:
    """One case, measured."""

    case: str
    ours_us: Spread
    torch_compile_us: Spread
    floor_us: Spread
    ratio: float
    target: float | None


def measure(case: Case, blocks: int) -> Row:
    """Compile ``case`` both ways and time them, and the floor, in turns."""
    # Dynamo looks through what it compiled of one code object: each case starts with none.
    torch.compiler.reset()
    torchbay.reset()
    target = case.make()
    contenders = [
        ready(torchbay.compile(target, backend=constant_backend)),
        ready(torch.compile(target, backend=constant_backend)),
        floor,
    ]
    ours, theirs, bare = time_in_turns(contenders, blocks)
    # Blocks side by side met the same load of the machine.
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Row(case.name, spread(ours), spread(theirs), spread(bare), ratio, case.target)


def ready(call: Call) -> Call:
    """Return ``call`` once it is compiled, after checking that its backend serves it."""
    x = torch.ones(1, WIDTH)
    for _ in range(3):
        output = call(x)
    if output is not OUTPUT:
        message = f"{call} does not serve its calls from what the backend returned"
        raise RuntimeError(message)
    return call


def time_in_turns(contenders: Sequence[Call], blocks: int) -> list[list[float]]:
    """Return seconds per call for each block of each contender."""
    x = torch.ones(1, WIDTH)
    lengths = [block_length(call, x) for call in contenders]
    seconds: list[list[float]] = [[] for _ in contenders]
    for _ in range(blocks):
        for call, length, seen in zip(contenders, lengths, seconds, strict=True):
            seen.append(time_block(call, x, length) / length)
    return seconds


def block_length(call: Call, x: torch.Tensor) -> int:
    """Return how many calls fill one block."""
    time_block(call, x, 200)
    return max(1, round(BLOCK_SECONDS * 200 / time_block(call, x, 200)))


def time_block(call: Call, x: torch.Tensor, length: int) -> float:
    """Return the seconds that ``length`` calls take."""
    started = time.perf_counter()
    for _ in range(length):
        call(x)
    return time.perf_counter() - started


def spread(seconds: Sequence[float]) -> Spread:
    """Return the median, the least and the 90th percentile in microseconds."""
    ordered = sorted(1e6 * second for second in seconds)
    return Spread(statistics.median(ordered), ordered[0], ordered[round(0.9 * (len(ordered) - 1))])


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector, other threads and autograd out of the figures."""
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        gc.enable()


def machine() -> dict[str, Any]:
    """Return what a reader needs to know to compare these figures with others."""
    return {
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchbay": torchbay.__version__,
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """Return the processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def print_table(rows: Sequence[Row]) -> None:
    """Print ``rows`` as a Markdown table."""
    print("; ".join(f"{key} {value}" for key, value in machine().items()))
    print("microseconds per call: median [least-90th percentile]\n")
    print("| case | torchbay | torch.compile | floor | ratio | target |")
    print("| --- | --: | --: | --: | --: | --: |")
    for row in rows:
        target = "" if row.target is None else f"{row.target:.2f}"
        cells = (row.case, row.ours_us, row.torch_compile_us, row.floor_us)
        print(f"| {' | '.join(map(str, cells))} | {row.ratio:.2f} | {target} |")


def main() -> None:
    """Measure every case and print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--blocks", type=int, default=200, help="blocks of each (default: 200)")
    arguments = parser.parse_args()
    with quiet():
        rows = [measure(case, arguments.blocks) for case in CASES]
    if arguments.json:
        document = {"machine": machine(), "rows": [attrs.asdict(row) for row in rows]}
        print(json.dumps(document, indent=2))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
