"""The backend keeps the promises of the plugin contract."""

from __future__ import annotations

from torchbay.testing import BackendSuite


class TestOpenVino(BackendSuite):
    """Runs the conformance kit against the installed backend."""

    backend_name = "openvino"
