"""Public bug reports about capture, each by what it says.

These have tests beside their neighbours, found by the link that each carries: `LINKS` names them.
The rest stand here.
"""

from __future__ import annotations

import contextvars
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import torchbay
from torchbay import errors

HERE = Path(__file__)
PYTORCH = "https://github.com/pytorch/pytorch"
LINKS = {
    "overlapping inputs get the graph of distinct ones": f"{PYTORCH}/issues/139789",
    "a dropout that does nothing hides a write": f"{PYTORCH}/issues/195422",
    "a class attribute is stale": f"{PYTORCH}/issues/176851",
    "a context variable is stale": "https://github.com/Lightning-AI/lightning-thunder/issues/1464",
    "two dropouts differ from eager": f"{PYTORCH}/issues/192635",
    "two dropouts swap": f"{PYTORCH}/issues/143431",
    "a counter takes a graph each": f"{PYTORCH}/issues/128319",
    "instances share one budget": f"{PYTORCH}/pull/171598",
    "inference tensors get a cryptic second graph": f"{PYTORCH}/issues/148983",
    "an error about a branch on a size names a symbol": f"{PYTORCH}/issues/136002",
    "a deleted model stays alive": f"{PYTORCH}/issues/155778",
    "threads break capture for good": f"{PYTORCH}/pull/189884",
    "a recompile has no reason": f"{PYTORCH}/issues/164119",
}

CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("report", LINKS)
def test_every_report_has_a_test_that_carries_its_link(report):
    tests = (path.read_text() for path in HERE.parents[1].glob("*/test_*.py") if path != HERE)
    docstring = f'    """{LINKS[report]}'
    assert docstring in HERE.read_text() or any(docstring in source for source in tests)


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_never_keeps_the_value_of_a_context_variable():
    """https://github.com/Lightning-AI/lightning-thunder/issues/1464"""
    compiled = torchbay.compile(lambda x: x * CONTEXT.get(), backend="eager")
    for value in (1.0, 1.0, 2.0, 2.0, 1.0):
        token = CONTEXT.set(value)
        try:
            assert compiled(torch.ones(1)).item() == value
        finally:
            CONTEXT.reset(token)


def test_draws_the_masks_of_two_dropouts_as_eager_does():
    """https://github.com/pytorch/pytorch/issues/192635"""

    def masks(x):
        return functional.dropout(x, 0.5), functional.dropout(x, 0.5)

    compiled = torchbay.compile(masks, backend="eager")
    for _ in range(3):
        torch.manual_seed(0)
        found = compiled(torch.ones(64))
        torch.manual_seed(0)
        assert all(map(torch.equal, found, masks(torch.ones(64))))
    assert torchbay.explain(compiled).calls["graph"] == 2


def test_keeps_two_dropouts_in_the_order_of_the_program():
    """https://github.com/pytorch/pytorch/issues/143431"""

    def program(x):
        first = functional.dropout(x, 0.5)
        second = functional.dropout(x, 0.5)
        return second - first, first

    compiled = torchbay.compile(program, backend="eager")
    for seed in range(3):
        torch.manual_seed(seed)
        found = compiled(torch.ones(64))
        torch.manual_seed(seed)
        assert all(map(torch.equal, found, program(torch.ones(64))))
    assert torchbay.explain(compiled).calls["graph"] == 2


def test_names_the_users_line_where_a_branch_fixes_a_dynamic_size():
    """https://github.com/pytorch/pytorch/issues/136002"""

    def program(x):
        if x.size(0) == 5:
            return x * 2
        return x * 3

    def marked(size):
        x = torch.ones(size, 2)
        torch._dynamo.mark_dynamic(x, 0)
        return x

    compiled = torchbay.compile(program, backend="eager")
    for size in (6, 7, 8):
        assert torch.equal(compiled(marked(size)), program(torch.ones(size, 2)))
    with pytest.raises(errors.DimensionFixed, match="dimension 0 of x") as caught:
        compiled(marked(5))
    line = program.__code__.co_firstlineno + 1
    assert f"{HERE.name}:{line}" in str(caught.value)
    assert "s0" not in str(caught.value)
    assert torch.equal(caught.value.result, torch.full((5, 2), 2.0))
