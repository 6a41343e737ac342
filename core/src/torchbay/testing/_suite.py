"""The class that an author subclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch

from torchbay._registry import choose
from torchbay.plugin import Backend
from torchbay.testing._artifacts import ArtifactTests
from torchbay.testing._claims import ClaimTests
from torchbay.testing._contract import ContractTests
from torchbay.testing._lifecycle import LifecycleTests
from torchbay.testing._models import ModelTests
from torchbay.testing._numerics import NumericsTests
from torchbay.testing._operators import OperatorTests
from torchbay.testing._subject import Subject

__all__ = ["BackendSuite"]

PLUGIN = "torchbay.testing.pytest_plugin"


# pytest runs the tests of the last class first.
class BackendSuite(
    ArtifactTests,
    LifecycleTests,
    ClaimTests,
    ModelTests,
    OperatorTests,
    NumericsTests,
    ContractTests,
):
    """All tests of the kit, for one backend on one device.

    Attributes:
        backend_name: The entry point's name.
        device: Where the tensors of the tests are.
        known_failures: Name of a test, with its parameters (``test_operator[kron]``) or without
            them -> link to what is known about it. Such a test must fail.
    """

    backend_name: ClassVar[str]
    device: ClassVar[str] = "cpu"
    known_failures: ClassVar[Mapping[str, str]] = {}

    pytestmark: ClassVar[Any] = [pytest.mark.filterwarnings("ignore")]

    @classmethod
    def make_backend(cls) -> Backend:
        """Return the backend under test; override it to test one that is not installed."""
        return choose(cls.backend_name)

    @pytest.fixture(scope="class")
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """Return the backend under test and the ways to reach it."""
        if not request.config.pluginmanager.has_plugin(PLUGIN):
            pytest.fail(f'add pytest_plugins = "{PLUGIN}" to the conftest.py in rootdir')
        kind = request.cls
        if unknown := [key for key in kind.known_failures if not _names_a_test(kind, key)]:
            pytest.fail(f"known_failures lists what is no test: {', '.join(unknown)}")
        return Subject(
            kind.make_backend(), kind.backend_name, torch.device(kind.device), kind.known_failures
        )

    @pytest.fixture(autouse=True)
    def inference(self) -> Iterator[None]:
        """Run every test without gradients; those about training enable them."""
        with torch.no_grad():
            yield


def _names_a_test(suite: type, key: str) -> bool:
    return key.startswith("test_") and hasattr(suite, key.partition("[")[0])
