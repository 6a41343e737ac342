"""Renders the demo's rows: as a table for people, as a document for programs."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from torchbay import __version__
from torchbay.cli._encoder import MODEL
from torchbay.cli._measurement import Measurement
from torchbay.cli._sentences import QUERY, SENTENCES

ABSENT = "-"
NUMBERS = ("compile\ns", "steady\nms", "ratio", "largest\ndiff", "lowest\ncosine")

MEANING = """\
compile  first call: the eager run, capture and build; warm caches shorten it
steady   median and range of four in five of {calls} calls; all take turns, under
         torch.no_grad() and torch.set_num_threads(1)
ratio    median over turns of steady to PyTorch eager's; below 1 is faster
diff     a repeated call's embeddings against eager's, as is the cosine"""


def as_text(rows: Sequence[Measurement], calls: int) -> Group:
    """Return the table, then what is wrong, then what the numbers mean."""
    query = Text.assemble("query: ", (QUERY, "bold"))
    meaning = Text(MEANING.format(calls=calls), style="dim")
    return Group(query, "", _table(rows), "", *_problems(rows), meaning)


def _problems(rows: Sequence[Measurement]) -> list[Text]:
    lines = [
        Text.assemble((row.backend, "bold red"), f": {problem}")
        for row in rows
        for problem in row.problems
    ]
    return [*lines, Text()] if lines else []


def _table(rows: Sequence[Measurement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("backend", no_wrap=True)
    for heading in NUMBERS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("nearest sentence")
    for row in rows:
        table.add_row(*_cells(row), style="red" if row.problems else None)
    return table


def _cells(row: Measurement) -> tuple[Text, ...]:
    cells = (row.backend, _compile(row), _steady(row), _ratio(row), *_closeness(row))
    return tuple(Text(cell) for cell in cells)


def _compile(row: Measurement) -> str:
    return ABSENT if row.compile_seconds is None else f"{row.compile_seconds:.2f}"


def _steady(row: Measurement) -> str:
    spread = row.steady_ms
    return f"{spread.median:.1f}\n{spread.low:.1f}-{spread.high:.1f}" if spread else ABSENT


def _ratio(row: Measurement) -> str:
    return ABSENT if row.ratio_to_eager is None else f"{row.ratio_to_eager:.2f}"


def _closeness(row: Measurement) -> tuple[str, str, str]:
    close = row.closeness
    if close is None:
        return ABSENT, ABSENT, "failed, see below"
    return (
        f"{close.largest_difference:.1e}" if close.largest_difference else "0",
        f"{close.lowest_cosine:.6f}",
        SENTENCES[close.nearest],
    )


def as_document(rows: Sequence[Measurement], calls: int) -> dict[str, Any]:
    """Return everything the table says, ready for ``json.dumps``."""
    return {
        "model": MODEL,
        "query": QUERY,
        "sentences": list(SENTENCES),
        "calls": calls,
        "threads": 1,
        "versions": {
            "torchbay": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "ok": not any(row.problems for row in rows),
        "rows": [_as_dict(row) for row in rows],
    }


def _as_dict(row: Measurement) -> dict[str, Any]:
    close = row.closeness
    return {
        "backend": row.backend,
        "compile_seconds": row.compile_seconds,
        "steady_ms": attrs.asdict(row.steady_ms) if row.steady_ms else None,
        "ratio_to_eager": row.ratio_to_eager,
        "largest_difference": _finite(close.largest_difference) if close else None,
        "lowest_cosine": _finite(close.lowest_cosine) if close else None,
        "nearest_sentence": SENTENCES[close.nearest] if close else None,
        "calls": row.calls,
        "problems": list(row.problems),
    }


def _finite(number: float) -> float | None:
    # JSON has no NaN and no infinity.
    return number if math.isfinite(number) else None
