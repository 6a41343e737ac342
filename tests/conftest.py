"""Settings of every test run: offline, with a compiler cache of its own."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = "torchbay.testing.pytest_plugin"


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return f"torch {torch.__version__} on {torch.cuda.get_device_name()}"
    return f"torch {torch.__version__}, no CUDA device: tests marked gpu are left out"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        for name in ("TORCHBAY_BACKEND", "TORCHBAY_LOG", "TORCHBAY_OFF", "TORCHBAY_SKIP_BACKENDS"):
            patch.delenv(name, raising=False)
        yield
