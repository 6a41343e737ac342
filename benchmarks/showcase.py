"""Prints what torchbay and torch.compile make of eleven programs, as a table in Markdown."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch is imported: afterwards it has no effect.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "showcase"))

from programs import PROGRAMS
from side_by_side import COLUMNS, cells, ours, theirs


def main() -> None:
    """Call every program both ways and print its row."""
    print(_row(COLUMNS))
    print(_row(["---"] * len(COLUMNS)))
    for program in PROGRAMS:
        print(_row(cells(program, ours(program), theirs(program))), flush=True)


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    main()
