"""The eager backend keeps the contract."""

from __future__ import annotations

from torchbay.testing import BackendSuite


class TestEager(BackendSuite):
    backend_name = "eager"
