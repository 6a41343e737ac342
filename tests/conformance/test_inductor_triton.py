"""The Inductor backend keeps the contract."""

from __future__ import annotations

from typing import ClassVar

import pytest

from torchbay.testing import BackendSuite

pytestmark = pytest.mark.slow


class TestInductorTriton(BackendSuite):
    backend_name = "inductor_triton"
    known_failures: ClassVar = {
        "test_promotion[there and back]": "https://github.com/pytorch/pytorch/issues/185337",
        "test_special_values[infinity times zero]": "https://github.com/pytorch/pytorch/pull/186281",
    }
