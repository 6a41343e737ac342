"""Real architectures through every backend: equal to eager, one graph, every later call from it."""

from __future__ import annotations

import pytest
import tiny
import torch

import torchbay
from torchbay._structure import tensors_in

BACKENDS = ["eager", "inductor_triton", "aoti"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_serves_every_later_call_from_one_graph(name, backend, device):
    model, inputs = tiny.make(name, device)
    expected = model(**inputs)
    compiled = torchbay.compile(model, backend=backend, fullgraph=True)

    results = [compiled(**inputs) for _ in range(3)]

    explanation = torchbay.explain(compiled)
    assert len(explanation.specializations) == 1
    assert explanation.calls == {"graph": 2, "eager": 1}
    for result in results:
        assert type(result) is type(expected)
        assert list(result) == list(expected)
        # float32 rounding over two layers, the order of additions being the compiler's
        torch.testing.assert_close(
            list(tensors_in(result)), list(tensors_in(expected)), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", tiny.MODELS)
@torch.no_grad()
def test_equals_eager_bit_for_bit_through_the_eager_backend(name):
    model, inputs = tiny.make(name)
    compiled = torchbay.compile(model, backend="eager", fullgraph=True)
    compiled(**inputs)
    torch.testing.assert_close(
        list(tensors_in(compiled(**inputs))), list(tensors_in(model(**inputs))), rtol=0, atol=0
    )
