"""What lowering keeps of a graph that is traced again for a backend."""

from __future__ import annotations

import torch

import torchbay
from torchbay.plugin import Capabilities

aten = torch.ops.aten


def transposed_copy(x):
    """Decompose ``clone`` into something with other strides."""
    return (x.transpose(-1, -2) + 0).transpose(-1, -2)


def test_copies_where_a_decomposition_leaves_nothing_to_view(recording):
    recording.capabilities = Capabilities(
        decompositions=lambda: {aten.clone.default: lambda x, **_: transposed_copy(x)}
    )
    compiled = torchbay.compile(lambda x: x.clone().view(-1), backend=recording, fullgraph=True)
    x = torch.randn(3, 4)
    compiled(x)
    assert torch.equal(compiled(x), x.view(-1))
