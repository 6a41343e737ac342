"""The conformance kit: shows that a backend keeps the promises of `torchbay.plugin`.

    # conftest.py
    pytest_plugins = "torchbay.testing.pytest_plugin"

    # test_conformance.py
    from torchbay.testing import BackendSuite

    class TestMyBackend(BackendSuite):
        backend_name = "mybackend"

Needs the extra ``torchbay[testing]``.
"""

from __future__ import annotations

from torchbay.testing._rewriting import rewrite_asserts

rewrite_asserts()

from torchbay.testing._suite import BackendSuite  # noqa: E402 - asserts are rewritten on import

__all__ = ["BackendSuite"]
