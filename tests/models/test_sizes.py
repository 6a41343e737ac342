"""Batches that grow and sentences of other lengths: few graphs, each right, every call from one."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch

import torchbay
from torchbay._structure import tensors_in

BATCHES = (2, 3, 5)
LENGTHS = (7, 9, 12)


def sized(inputs, batch, length):
    """Return inputs of another batch size and, where they are token ids, another length."""
    found = {}
    for name, value in inputs.items():
        rows = value[:1].repeat(batch, *[1] * (value.dim() - 1))
        is_text = value.dtype == torch.long
        found[name] = rows.repeat(1, 8)[:, :length].contiguous() if is_text else rows
    return found


def has_text(inputs):
    return any(value.dtype == torch.long for value in inputs.values())


@pytest.mark.parametrize("name", tiny.MODELS)
@torch.no_grad()
def test_serves_every_size_from_at_most_three_graphs(name, capsys):
    model, inputs = tiny.make(name)
    compiled = torchbay.compile(model, backend="eager")
    lengths = LENGTHS if has_text(inputs) else LENGTHS[:1]
    seen = list(itertools.product(BATCHES, lengths))

    for batch, length in seen:
        given = sized(inputs, batch, length)
        before = torchbay.explain(compiled).calls["graph"]
        results = [compiled(**given) for _ in range(2)]
        expected = list(tensors_in(model(**given)))
        for result in results:
            torch.testing.assert_close(list(tensors_in(result)), expected, rtol=0, atol=0)
        assert torchbay.explain(compiled).calls["graph"] >= before + 1

    explanation = torchbay.explain(compiled)
    with capsys.disabled():
        graphs = len(explanation.specializations)
        print(f"\n{name}: {len(seen)} sizes, {graphs} graphs, calls {dict(explanation.calls)}")
    assert len(explanation.specializations) <= 3
    assert explanation.eager == ()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_is_right_for_every_size_through_inductor(name, device):
    model, inputs = tiny.make(name, device)
    compiled = torchbay.compile(model, backend="inductor_triton", fullgraph=True)
    for batch, length in zip(BATCHES, LENGTHS, strict=True):
        given = sized(inputs, batch, length)
        for _ in range(2):
            found, expected = compiled(**given), model(**given)
            # float32 rounding over two layers, the order of additions being the compiler's
            torch.testing.assert_close(
                list(tensors_in(found)), list(tensors_in(expected)), rtol=1e-4, atol=1e-5
            )
    assert len(torchbay.explain(compiled).specializations) <= 3
