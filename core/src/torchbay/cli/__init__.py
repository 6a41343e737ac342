"""The command line: ``torchbay backends``, ``torchbay doctor``, ``torchbay demo``.

Commands import torch, rich and the rest when they run, so that help stays quick.
"""

from __future__ import annotations

from typing import Any

import click

from torchbay import __version__
from torchbay.cli._backends import backends
from torchbay.cli._conformance import conformance
from torchbay.cli._demo import demo
from torchbay.cli._doctor import doctor
from torchbay.errors import TorchbayError

__all__ = ["main"]


class _Commands(click.Group):
    """A group that prints torchbay's own errors without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TorchbayError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="torchbay")
def main() -> None:
    """Compile PyTorch models with backends that plug in."""


main.add_command(backends)
main.add_command(conformance)
main.add_command(demo)
main.add_command(doctor)
