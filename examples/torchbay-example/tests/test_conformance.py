"""The example keeps the promises of the plugin contract."""

from torchbay.testing import BackendSuite


class TestExample(BackendSuite):
    """Runs the conformance kit against the installed backend."""

    backend_name = "example"
