"""Packed sequences: their layout is fixed by lengths, which are a branch on data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchbay

PADDED = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
SORTED, UNSORTED, OTHER = map(torch.tensor, ([5, 3, 3], [2, 5, 1], [1, 1, 4]))


def packed(x, lengths, **options):
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False, **options)


CALLS = {
    "data": lambda x, lengths: packed(x, lengths).data * 2,
    "batch sizes": lambda x, lengths: packed(x, lengths).batch_sizes,
    "largest batch": lambda x, lengths: x * int(packed(x, lengths).batch_sizes[0]),
    "round trip": lambda x, lengths: pad_packed_sequence(packed(x, lengths), batch_first=True),
    "time first": lambda x, lengths: pad_packed_sequence(packed(x, lengths)),
    "total length": lambda x, lengths: pad_packed_sequence(
        packed(x, lengths), batch_first=True, padding_value=-1.0, total_length=7
    ),
    "lengths computed": lambda x, lengths: packed(x, lengths.clamp(min=2)).data,
    "list of lengths": lambda x, lengths: packed(x, lengths.tolist()).data,
    "constant lengths": lambda x, lengths: packed(x, [4, 2, 2]).data + lengths.sum(),
    "arithmetic on sizes": lambda x, lengths: (packed(x, lengths).batch_sizes * 2, x + 1),
}


@pytest.fixture
def check(recording):
    def check(call, *inputs):
        compiled = torchbay.compile(call, backend=recording)
        for given in inputs * 2:
            found, expected = compiled(*given), call(*given)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        return torchbay.explain(compiled)

    return check


@pytest.mark.parametrize("name", CALLS)
def test_serves(name, check):
    explanation = check(CALLS[name], *((PADDED, n) for n in (SORTED, UNSORTED, OTHER)))
    assert explanation.eager == ()
    assert explanation.calls["graph"] >= 3


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_runs_packed_sequences_through(kind, check):
    layer = kind(2, 4, batch_first=True, bidirectional=True)

    def call(x, lengths):
        output, hidden = layer(packed(x, lengths))
        return pad_packed_sequence(output, batch_first=True), hidden

    explanation = check(call, (PADDED, SORTED), (PADDED, UNSORTED))
    assert dict(explanation.calls) == {"graph": 2, "eager": 2}


def test_recompiles_for_other_lengths_only(check):
    call = CALLS["round trip"]
    explanation = check(call, (PADDED, SORTED), (PADDED + 1, SORTED), (PADDED, OTHER))
    assert dict(explanation.calls) == {"graph": 4, "eager": 2}
    assert "== [4, 1, 1]" in "".join(g for s in explanation.specializations for g in s.gates)


def test_runs_eagerly_what_changes_the_layout(recording):
    def call(x, lengths):
        sequence = packed(x, lengths)
        return sequence.data, sequence.batch_sizes.add_(1)

    compiled = torchbay.compile(call, backend=recording)
    with pytest.warns(torchbay.errors.TorchbayWarning, match="layout.*test_packed.py"):
        compiled(PADDED, SORTED)
    assert compiled(PADDED, SORTED)[1].tolist() == [4, 4, 4, 2, 2]
