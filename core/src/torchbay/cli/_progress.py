"""Says on standard error which step a long command is at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Announce = Callable[[str], None]


@contextmanager
def steps(*, silent: bool) -> Iterator[Announce]:
    """Yield a function that starts the next step; each step shows the time it took."""
    console = Console(stderr=True)
    if silent:
        yield lambda _step: None
    elif console.is_terminal:
        with _live(console) as announce:
            yield announce
    else:
        # A live display would say nothing until the end when its output is a file.
        yield console.print


@contextmanager
def _live(console: Console) -> Iterator[Announce]:
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def announce(step: str) -> None:
            _finish_all(progress)
            progress.add_task(step, total=1)

        yield announce
        _finish_all(progress)


def _finish_all(progress: Progress) -> None:
    for task in progress.tasks:
        progress.update(task.id, completed=1)
