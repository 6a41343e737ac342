"""The results of one backend, counted and described."""

from __future__ import annotations

import functools
import platform
from collections import Counter
from typing import Any

import attrs
import torch

import torchbay
from torchbay.testing._outcome import OUTCOMES, Result

__all__ = ["Record", "Tested", "tested"]


@attrs.frozen(kw_only=True)
class Tested:
    """What was tested, and on what."""

    backend: str
    version: str
    api_version: int | None
    device: str
    torchbay: str = torchbay.__version__
    torch: str = str(torch.__version__)
    python: str = platform.python_version()
    machine: str = platform.machine()


@functools.cache
def tested(suite: Any) -> Tested:
    """Describe the backend of a suite, also one that cannot be loaded."""
    try:
        api_version = suite.make_backend().api_version
    except Exception:  # noqa: BLE001 - its tests say why
        api_version = None
    versions = {listing.name: listing.version for listing in torchbay.backends()}
    return Tested(
        backend=suite.backend_name,
        version=versions.get(suite.backend_name, ""),
        api_version=api_version,
        device=suite.device,
    )


@attrs.define
class Record:
    """The results of one suite."""

    tested: Tested
    results: list[Result] = attrs.field(factory=list)

    def counts(self) -> dict[str, int]:
        """Return how many tests ended in which way."""
        found = Counter(result.outcome for result in self.results)
        return {outcome: found[outcome] for outcome in OUTCOMES}

    def summary(self) -> str:
        """Say in one line how it went."""
        counts, subject = self.counts(), self.tested
        failures = "known failure" if counts["known failure"] == 1 else "known failures"
        wrong = f", {counts['wrong']} wrong" if counts["wrong"] else ""
        return (
            f"torchbay: {f'{subject.backend} {subject.version}'.rstrip()}, "
            f"plugin API {subject.api_version}: {counts['passed']} passed, "
            f"{counts['refused']} refused cleanly, {counts['known failure']} {failures}{wrong}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        results = [attrs.asdict(result) for result in self.results]
        return {"tested": attrs.asdict(self.tested), "counts": self.counts(), "results": results}
