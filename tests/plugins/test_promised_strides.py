"""Outputs of Inductor that come in other strides than the graph has."""

from __future__ import annotations

import torch

from torchbay_inductor_triton._layout import as_promised, broken_promises


def test_names_the_outputs_that_came_padded():
    fakes = [torch.empty(2, 3), torch.empty(2, 3), torch.empty(1, 3), torch.empty(2, 3)]
    chosen = [(3, 1), (4, 1), (4, 1), (4, 1)]
    assert broken_promises(fakes, chosen, frozenset({3})) == {1: (3, 1)}


def test_copies_what_came_padded_to_where_it_was_promised():
    padded = torch.arange(8.0).view(2, 4)[:, :3]
    [made] = as_promised(lambda inputs: [padded], {0: (3, 1)})([])
    assert made.stride() == (3, 1)
    assert torch.equal(made, padded)
