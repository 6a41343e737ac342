"""``torchbay backends``: what is installed, and in which state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from torchbay import BackendListing

NOTHING_INSTALLED = """\
No backend is installed. Install at least one of:
  pip install torchbay-eager             plain PyTorch, the reference
  pip install torchbay-inductor-triton   Inductor: C++ on CPU, Triton on CUDA
  pip install torchbay-aoti              AOTInductor"""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def backends(*, as_json: bool) -> None:
    """List the installed backends without importing any of them."""
    import torchbay

    listings = torchbay.backends()
    if as_json:
        click.echo(json.dumps([_as_dict(listing) for listing in listings], indent=2))
    elif listings:
        _print(listings)
    else:
        click.echo(NOTHING_INSTALLED)


def _as_dict(listing: BackendListing) -> dict[str, str | None]:
    return {
        "name": listing.name,
        "distribution": listing.distribution,
        "version": listing.version,
        "state": listing.state,
        "error": None if listing.error is None else str(listing.error),
    }


def _print(listings: Sequence[BackendListing]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    console.print(_table(listings))
    for listing in listings:
        if listing.error is not None:
            console.print(f"[bold]{escape(listing.name)}[/]: {escape(str(listing.error))}")


def _table(listings: Sequence[BackendListing]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "distribution", "version", "state", box=box.SIMPLE_HEAD)
    for listing in listings:
        cells = (listing.name, listing.distribution, listing.version, listing.state)
        style = None if listing.error is None else "red"
        table.add_row(*(Text(str(cell)) for cell in cells), style=style)
    return table
