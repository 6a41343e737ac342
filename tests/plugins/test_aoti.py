"""What is the aoti plugin's alone: checked inputs, packages, and a load that may crash."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from torchbay.errors import BackendFailed, InvalidArgument
from torchbay_aoti import _package
from torchbay_aoti._backend import AotiBackend
from torchbay_aoti._inputs import copying_back

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scale(make_request, tmp_path_factory):
    """An executable of ``x * w`` with a literal, and the folder its package went through."""
    folder = tmp_path_factory.mktemp("packages")
    backend = AotiBackend()

    def function(w, x):
        return (x * w + torch.tensor(2.0),)

    inputs = [torch.full((4,), 3.0), torch.ones(4)]
    request = make_request(function, inputs, state_count=1, options=backend.options())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        return backend.compile(request), folder


def fit() -> list[torch.Tensor]:
    return [torch.full((4,), 3.0), torch.ones(4)]


def released(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("position", "value", "said"),
    [
        (0, torch.ones(4, dtype=torch.float64), "float64"),
        (0, torch.ones(8), "sizes"),
        (1, torch.ones(1, 4), "sizes"),
        (1, torch.ones(8)[::2], "strides"),
        (1, torch.ones(4).to_sparse(), "layout"),
        (1, torch.ones(4, device="meta"), "meta"),
        (1, None, "NoneType"),
        (1, 1.0, "float"),
        (1, released(torch.ones(4)), "storage"),
        (0, released(torch.ones(4)), "storage"),
        (0, torch.ones(4, dtype=torch.complex64).conj().imag.contiguous()._neg_view(), "negation"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_refuses_inputs_its_code_would_misread(scale, position, value, said, warm):
    run = scale[0].run
    if warm:
        run(fit())
    inputs = fit()
    inputs[position] = value
    with pytest.raises(InvalidArgument, match=said):
        run(inputs)
    [result] = run(fit())
    assert result.tolist() == [5.0] * 4


@pytest.mark.parametrize("inputs", [[], fit()[:1], [*fit(), torch.ones(4)]])
def test_refuses_another_number_of_inputs(scale, inputs):
    with pytest.raises(InvalidArgument, match="takes 2 inputs"):
        scale[0].run(inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Parameter(torch.ones(4)),
        lambda: torch.ones(8)[4:],
        lambda: torch.ones(4, requires_grad=True),
    ],
)
def test_takes_every_tensor_that_fits(scale, make):
    with torch.no_grad():
        [result] = scale[0].run([make(), torch.ones(4)])
    assert result.tolist() == [3.0] * 4


def test_takes_one_tensor_for_two_inputs(scale):
    x = torch.full((4,), 2.0)
    [result] = scale[0].run([x, x])
    assert result.tolist() == [6.0] * 4


def test_takes_inference_tensors(scale):
    with torch.inference_mode():
        [result] = scale[0].run(fit())
    assert result.tolist() == [5.0] * 4


def test_leaves_no_file_behind(scale):
    executable, folder = scale
    assert [*folder.glob("torchbay-*"), *folder.glob("aotinductor_*")] == []
    assert executable.run(fit())[0].tolist() == [5.0] * 4


@pytest.fixture
def _unproven(monkeypatch):
    monkeypatch.setattr(_package, "_proven", False)


@pytest.mark.usefixtures("_unproven")
def test_turns_a_crash_while_loading_into_an_error(monkeypatch):
    crashed = subprocess.CompletedProcess([], -signal.SIGSEGV)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: crashed)
    with pytest.raises(BackendFailed, match=r"SIGSEGV.*LD_PRELOAD"):
        _package.load(Path("any.pt2"), torch.device("cpu"))


@pytest.mark.usefixtures("_unproven")
def test_reports_a_package_that_cannot_be_loaded(tmp_path):
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(b"no archive")
    with pytest.raises(RuntimeError, match="archive"):
        _package.load(damaged, torch.device("cpu"))


def test_writes_to_misaligned_inputs():
    def run_on_copies(inputs):
        inputs[0].add_(1)
        return (inputs[0] * 2,)

    x = torch.zeros(5)[1:]
    [doubled] = copying_back(run_on_copies, [0])([x])
    assert x.tolist() == [1.0] * 4
    assert doubled.tolist() == [2.0] * 4
