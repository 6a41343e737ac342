"""Settings of the tests that trace thousands of programs."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_records_of_tracing():
    """Keep pytest from formatting what PyTorch logs about each graph."""
    before = logging.root.manager.disable
    logging.disable(logging.DEBUG)
    yield
    logging.disable(before)
