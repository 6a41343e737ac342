"""Examines one backend, and makes out what helps where it fails."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from typing import Literal

import attrs

from torchbay import BackendListing
from torchbay.cli._child import Child, probe
from torchbay.cli._machine import standard_library
from torchbay.cli._remedies import known_remedy
from torchbay.errors import BackendError

__all__ = ["Check", "Checkup", "examine"]

_TAIL = 4000
_CLASH = (
    "Start Python with LD_PRELOAD={library}, with which it works here: PyTorch's copy of the C++ "
    "standard library clashes with the compiler's"
)


@attrs.frozen(kw_only=True)
class Check:
    """How a backend fared on one device.

    Attributes:
        device: The device's type.
        state: ``declines`` if it takes neither of the tiny functions that were tried,
            ``unclaimed`` if it does not compile for the device.
        seconds: How long that took, from the start of a process to its end.
        what: What went wrong.
        account: On whose account.
        remedy: What to do about it.
        output: The end of what the process printed, with the traceback of an error.
    """

    device: str
    state: Literal["works", "fails", "declines", "unclaimed"]
    seconds: float = 0.0
    what: str = ""
    account: str = ""
    remedy: str = ""
    output: str = ""


@attrs.frozen(kw_only=True)
class Checkup:
    """All checks of one backend; ``api_version`` is None if its plugin cannot be loaded."""

    name: str
    distribution: str
    version: str
    api_version: int | None = None
    claims: Sequence[str] = ()
    checks: Sequence[Check] = ()

    @property
    def is_fit(self) -> bool:
        """Whether it works on each device that it claims and that is here."""
        return {check.state for check in self.checks} - {"unclaimed"} == {"works"}


def examine(
    listing: BackendListing,
    devices: Sequence[str],
    timeout: float,
    announce: Callable[[str], None],
) -> Checkup:
    """Examine a backend on each device, in a process each."""
    checkup = Checkup(name=listing.name, distribution=listing.distribution, version=listing.version)
    if error := listing.error:
        return attrs.evolve(checkup, checks=[_known_failure(error, devices[0])])
    for device in devices:
        announce(f"Checking {listing.name} on {device}")
        checkup = _with_check(checkup, device, timeout)
    return checkup


def _known_failure(error: BackendError, device: str) -> Check:
    return Check(
        device=device,
        state="fails",
        what=error.what,
        account=error.account,
        remedy=error.remedy,
    )


def _with_check(checkup: Checkup, device: str, timeout: float) -> Checkup:
    child = probe(checkup.name, device, timeout=timeout)
    check = _verdict(device, child)
    if check.state == "fails":
        remedy = _preload(checkup.name, device, timeout, child) or _remedy(checkup, check)
        check = attrs.evolve(check, remedy=remedy)
    return attrs.evolve(
        checkup,
        api_version=child.notes.get("api_version", checkup.api_version),
        claims=child.notes.get("claims", checkup.claims),
        checks=[*checkup.checks, check],
    )


def _verdict(device: str, child: Child) -> Check:
    notes = child.notes
    check = Check(
        device=device,
        state=notes.get("state", "fails"),
        seconds=round(child.seconds, 1),
        what=notes.get("what", ""),
        account=notes.get("account", ""),
        remedy=notes.get("remedy", ""),
        output=(notes.get("output", "") + child.output)[-_TAIL:],
    )
    # A process can die after its verdict, too.
    is_cut_short = "state" not in notes or (child.status != 0 and check.state != "fails")
    return attrs.evolve(check, state="fails", what=child.end) if is_cut_short else check


def _preload(name: str, device: str, timeout: float, child: Child) -> str | None:
    """Try what helps when two C++ standard libraries clash; return it if it does."""
    is_suspect = child.has_crashed or "LD_PRELOAD" in child.notes.get("remedy", "")
    library = standard_library() if is_suspect and "LD_PRELOAD" not in os.environ else None
    if library is None:
        return None
    again = _verdict(device, probe(name, device, timeout=timeout, LD_PRELOAD=library))
    return _CLASH.format(library=shlex.quote(library)) if again.state == "works" else None


def _remedy(checkup: Checkup, check: Check) -> str:
    return (
        known_remedy(f"{check.what}\n{check.output}")
        or check.remedy.removesuffix(".")
        or f"Report it to the authors of {checkup.distribution}, with what "
        "torchbay doctor --json prints"
    )
