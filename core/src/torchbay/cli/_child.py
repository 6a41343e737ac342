"""Runs probes in child processes, so that nothing they do harms this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

__all__ = ["Child", "probe"]

_COMMAND = (sys.executable, "-P", "-X", "faulthandler", "-m", "torchbay.cli._probe")
_SIGNALS = {one.value: one.name for one in signal.Signals}
_CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGSEGV}


@attrs.frozen(kw_only=True)
class Child:
    """A process that has ended.

    Attributes:
        notes: What it noted down, later notes over earlier ones.
        output: What it printed.
        status: Its exit status, negative for a signal, None if it had to be killed.
        seconds: How long it ran.
    """

    notes: Mapping[str, Any]
    output: str
    status: int | None
    seconds: float

    @property
    def has_crashed(self) -> bool:
        """Whether machine code brought it down."""
        return self.status in _CRASHES

    @property
    def end(self) -> str:
        """Say how it ended, and at which step."""
        step = f"while {self.notes['step']}" if "step" in self.notes else "while starting"
        if self.status is None:
            return f"the process hung {step}, and was killed after {self.seconds:.0f} s"
        if self.status < 0:
            return f"the process died of {_SIGNALS.get(-self.status, 'a signal')} {step}"
        return f"the process ended with exit status {self.status} {step}"


def probe(*subject: str, timeout: float, **variables: str) -> Child:
    """Run a probe to its end, or kill it and what it started when its time is up."""
    with TemporaryDirectory(prefix="torchbay-doctor-", ignore_cleanup_errors=True) as folder:
        report, output = Path(folder, "report"), Path(folder, "output")
        started = time.perf_counter()
        # A file, for a compiler that outlives the probe would keep a pipe open.
        with output.open("wb") as printed:
            process = subprocess.Popen(
                [*_COMMAND, str(report), *subject],
                env=_environment(folder) | variables,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = _wait(process, timeout)
        return Child(
            notes=_notes(report),
            output=output.read_text(encoding="utf-8", errors="replace"),
            status=status,
            seconds=time.perf_counter() - started,
        )


def _environment(folder: str) -> dict[str, str]:
    """Return an environment in which nothing is switched off, and nothing compiled before."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCHBAY_OFF"}
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return kept | {name: str(Path(folder, name)) for name in caches}


def _wait(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _notes(report: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for line in _lines(report):
        # The last line of a process that died may be cut short.
        with contextlib.suppress(ValueError):
            found |= json.loads(line)
    return found


def _lines(report: Path) -> Sequence[str]:
    return report.read_text(encoding="utf-8").splitlines() if report.exists() else []
