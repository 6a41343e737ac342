"""``torchbay demo``: one real model through every installed backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from torchbay.errors import NoBackend

if TYPE_CHECKING:
    from torchbay.cli._measurement import Measurement
    from torchbay.cli._progress import Announce


@click.command(short_help="Run a real model through every installed backend.")
@click.option(
    "--backend",
    "names",
    metavar="NAME",
    multiple=True,
    help="Run this backend; may be repeated. Without it, every installed one runs.",
)
@click.option(
    "--calls",
    type=click.IntRange(min=1),
    default=30,
    show_default=True,
    help="How many calls of each to time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.pass_context
def demo(ctx: click.Context, *, names: tuple[str, ...], calls: int, as_json: bool) -> None:
    """Encode sentences with all-MiniLM-L6-v2 through every installed backend.

    Exits with 1 if a backend fails, if its result is off, or if its calls after the first were
    not served from a graph.
    """
    from torchbay.cli import _progress

    chosen = tuple(dict.fromkeys(names)) or _installed()
    with _progress.steps(silent=as_json) as announce:
        rows = _measure(chosen, calls, announce)
    _print(rows, calls, as_json=as_json)
    if any(row.problems for row in rows):
        ctx.exit(1)


def _installed() -> tuple[str, ...]:
    import torchbay

    names = tuple(one.name for one in torchbay.backends() if one.state != "skipped")
    if not names:
        raise NoBackend(
            "no usable backend is installed",
            account="torchbay demo",
            remedy="Run: pip install torchbay-eager torchbay-inductor-triton torchbay-aoti",
        )
    return names


def _measure(names: Sequence[str], calls: int, announce: Announce) -> list[Measurement]:
    announce("Loading the model")
    from torchbay.cli import _encoder, _sentences, _turns

    encoder, batch = _encoder.load([*_sentences.SENTENCES, _sentences.QUERY])
    backends = {name: name for name in names}
    return _turns.measure(encoder, batch, backends, calls=calls, announce=announce)


def _print(rows: Sequence[Measurement], calls: int, *, as_json: bool) -> None:
    from torchbay.cli import _report

    if as_json:
        click.echo(json.dumps(_report.as_document(rows, calls), indent=2, allow_nan=False))
        return
    from rich.console import Console

    Console().print(_report.as_text(rows, calls))
