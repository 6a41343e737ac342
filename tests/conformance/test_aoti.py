"""The AOTInductor backend keeps the contract."""

from __future__ import annotations

from typing import ClassVar

import pytest

from torchbay.testing import BackendSuite

pytestmark = pytest.mark.slow


class TestAoti(BackendSuite):
    backend_name = "aoti"
    known_failures: ClassVar = {
        "test_promotion[there and back]": "https://github.com/pytorch/pytorch/issues/185337",
    }
