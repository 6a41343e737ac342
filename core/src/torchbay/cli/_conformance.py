"""``torchbay conformance``: runs the conformance kit on an installed backend."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import click

SUITE = """\
from torchbay.testing import BackendSuite


class TestConformance(BackendSuite):
    backend_name = {name!r}
    device = {device!r}
"""

FILE = click.Path(dir_okay=False, path_type=Path, resolve_path=True)


@click.command()
@click.argument("name")
@click.option("--device", default="cpu", show_default=True, help="Where the tensors are.")
@click.option("--report", type=FILE, help="Write the results as JSON.")
@click.option("--html", type=FILE, help="Write the results as one HTML page.")
@click.option("--full", is_flag=True, help="Run all of PyTorch's operators, not a sample of them.")
@click.option("-k", "expression", help="Run only tests whose names match, as pytest -k does.")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
def conformance(
    *,
    name: str,
    device: str,
    report: Path | None,
    html: Path | None,
    full: bool,
    expression: str | None,
    pytest_args: Sequence[str],
) -> None:
    """Show that the installed backend NAME keeps the plugin contract.

    Arguments after -- go to pytest.
    """
    from torchbay._registry import check_name

    check_name(name)
    if importlib.util.find_spec("pytest") is None:
        raise click.ClickException("the kit needs pytest: pip install 'torchbay[testing]'")
    options = [
        *(("--torchbay-report", str(report)) if report else ()),
        *(("--torchbay-html", str(html)) if html else ()),
        *(("--torchbay-full",) if full else ()),
        *(("-k", expression) if expression else ()),
        *pytest_args,
    ]
    sys.exit(_run(SUITE.format(name=name, device=device), options))


def _run(suite: str, options: Sequence[str]) -> int:
    """Run a suite in a process of its own: code under test may bring it down."""
    with TemporaryDirectory(prefix="torchbay-conformance-") as folder:
        test, settings = Path(folder, "test_conformance.py"), Path(folder, "pytest.ini")
        test.write_text(suite, encoding="utf-8")
        settings.write_text("[pytest]\naddopts = -q -p no:cacheprovider\n", encoding="utf-8")
        plugin = ("-p", "torchbay.testing.pytest_plugin")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            str(settings),
            *plugin,
            *options,
            str(test),
        ]
        code = subprocess.run(command, check=False).returncode
    if code < 0:
        death = signal.Signals(-code).name
        raise click.ClickException(f"{death} ended the process. Add -- -v to see in which test")
    return code
