"""``torchbay doctor``: which installed backends work here, and what to do about the others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from torchbay.cli._checkup import Check, Checkup
    from torchbay.cli._machine import Machine

_STYLES = {"works": "green", "fails": "bold red", "declines": "yellow", "unclaimed": "dim"}


@click.command(short_help="Find out which installed backends work on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=180,
    show_default=True,
    metavar="SECONDS",
    help="Give a backend this long on each device.",
)
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool, timeout: float) -> None:
    """Find out which installed backends work on this machine.

    Each compiles and runs a tiny function, on the CPU and on an accelerator if there is one, in a
    process of its own, with empty compiler caches. Exits with 1 if one of them does not work.
    """
    import torchbay
    from torchbay.cli import _checkup, _machine, _progress

    listings = [one for one in torchbay.backends() if one.state != "skipped"]
    with _progress.steps(silent=as_json) as announce:
        announce("Looking around")
        machine = _machine.look_around(timeout)
        examined = listings if machine.devices else []
        checkups = [
            _checkup.examine(listing, machine.devices, timeout, announce) for listing in examined
        ]
    _print(machine, checkups, as_json=as_json)
    if not _is_well(machine, checkups):
        ctx.exit(1)


def _is_well(machine: Machine, checkups: Sequence[Checkup]) -> bool:
    return bool(machine.devices) and all(checkup.is_fit for checkup in checkups)


def _print(machine: Machine, checkups: Sequence[Checkup], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_as_document(machine, checkups), indent=2))
        return
    from rich.console import Console

    console = Console()
    for part in _parts(machine, checkups):
        console.print(part)


def _as_document(machine: Machine, checkups: Sequence[Checkup]) -> dict[str, Any]:
    import attrs

    return {
        "ok": _is_well(machine, checkups),
        "machine": attrs.asdict(machine),
        "backends": [attrs.asdict(checkup) for checkup in checkups],
    }


def _parts(machine: Machine, checkups: Sequence[Checkup]) -> Iterator[RenderableType]:
    yield _machine_table(machine)
    if checkups:
        yield _table(machine, checkups)
    elif machine.devices:
        yield "No backend is installed; torchbay backends says which there are."
    for finding in machine.findings:
        yield _advice("this machine", "yellow", finding.what, finding.remedy)
    for checkup in checkups:
        yield from _troubles(checkup)


def _machine_table(machine: Machine) -> Table:
    from rich.table import Table
    from rich.text import Text

    versions = machine.versions
    rows = {
        "torchbay": versions.get("torchbay"),
        "plugin API": " to ".join(map(str, versions.get("plugin_api", []))),
        "Python": versions.get("python"),
        "torch": versions.get("torch"),
        "Triton": versions.get("triton"),
        "C++": machine.compiler,
        "GPU": ", ".join(versions.get("gpus", [])),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, Text(value or "none"))
    return table


def _table(machine: Machine, checkups: Sequence[Checkup]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "distribution", "API", *machine.devices, box=box.SIMPLE_HEAD)
    for checkup in checkups:
        api = "-" if checkup.api_version is None else str(checkup.api_version)
        cells = [_cell(check) for check in checkup.checks]
        table.add_row(Text(checkup.name), Text(_origin(checkup)), api, *cells)
    return table


def _origin(checkup: Checkup) -> str:
    # Several where a name is claimed twice.
    pairs = zip(checkup.distribution.split(", "), checkup.version.split(", "), strict=True)
    return ", ".join(map(" ".join, pairs))


def _cell(check: Check) -> Text:
    from rich.text import Text

    seconds = f" {check.seconds:.1f} s" if check.state == "works" else ""
    return Text(f"{check.state}{seconds}", style=_STYLES[check.state])


def _troubles(checkup: Checkup) -> Iterator[RenderableType]:
    for check in checkup.checks:
        if check.what:
            account = f" ({check.account})" if check.account else ""
            subject = f"{checkup.name} on {check.device}"
            yield _advice(subject, _STYLES[check.state], f"{check.what}{account}", check.remedy)
    if {check.state for check in checkup.checks} == {"unclaimed"}:
        what = f"it compiles for {', '.join(checkup.claims)}, and there is none here"
        yield _advice(checkup.name, "bold red", what, "Use another backend on this machine")


def _advice(subject: str, style: str, what: str, remedy: str) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    told = Text.assemble((subject, style), f": {what.removesuffix('.')}.")
    return Group(told, Padding(Text(f"{remedy.removesuffix('.')}."), (0, 0, 1, 2)))
