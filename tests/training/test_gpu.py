"""What CUDA computes otherwise than the CPU: cuDNN's norms and recurrences, fused attention."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import torchbay

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        dropped = 0.1 if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropped)


MODULES = {
    "convolutions and batch norm": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    ),
    "a recurrence": lambda: nn.LSTM(8, 16, 2, batch_first=True),
    "attention": lambda: Attention().eval(),
    "attention with dropout": Attention,
}
INPUTS = {
    "convolutions and batch norm": (4, 3, 16, 16),
    "a recurrence": (4, 6, 8),
    "attention": (2, 10, 32),
    "attention with dropout": (2, 10, 32),
}


def gradients(module, x):
    torch.manual_seed(0)
    module.zero_grad()
    result = module(x)
    result = result[0] if isinstance(result, tuple) else result
    result.square().mean().backward()
    return [result.detach(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("backend", ["eager", "inductor_triton"])
def test_computes_the_gradients_of(name, backend, autocast):
    torch.manual_seed(1)
    module = MODULES[name]().cuda()
    twin = copy.deepcopy(module)
    compiled = torchbay.compile(module, backend=backend)
    is_random = "dropout" in name and backend != "eager"
    for _ in range(3):
        x = torch.randn(INPUTS[name], device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), warnings.catch_warnings():
            warnings.simplefilter("ignore", torchbay.errors.TorchbayWarning)
            found, expected = gradients(compiled, x), gradients(twin, x)
        close = {"rtol": 3e-2, "atol": 3e-2} if autocast else {"rtol": 1e-3, "atol": 1e-4}
        if not is_random:
            torch.testing.assert_close(found, expected, **close)
        torch.testing.assert_close(list(module.buffers()), list(twin.buffers()), **close)
    explanation = torchbay.explain(compiled)
    if name == "a recurrence":
        # cuDNN packs the weights of one into memory of its own, which no operator says.
        assert "UntypedStorage" in explanation.eager[0].reason
    else:
        assert explanation.calls["graph"] == 2, explanation.eager
