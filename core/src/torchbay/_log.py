"""Reasons, printed as they happen: ``TORCHBAY_LOG=recompiles``."""

from __future__ import annotations

import os
import sys

__all__ = ["log"]


def log(topic: str, text: str) -> None:
    """Print a line to standard error if ``TORCHBAY_LOG`` names its topic."""
    topics = os.environ.get("TORCHBAY_LOG", "").split(",")
    if topic in (name.strip() for name in topics):
        sys.stderr.write(f"torchbay {topic}: {text}\n")
