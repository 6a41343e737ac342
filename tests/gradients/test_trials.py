"""The trials' own checks: each kind of wrong gradient is found out."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from passes import PASSES, Pass, dense, expanded, lazy, strided
from scenarios._scenario import CRASH, EAGERLY, REFUSED, WRONG
from torch import nn
from trials import (
    EXACT,
    RAISED,
    ROUNDED,
    Trial,
    copied,
    play,
    share_from_graphs,
    spread,
    table,
    with_passes,
)

from torchbay.errors import NotServed


def product(x, y):
    return x * y, x.sum()


def normed():
    return nn.BatchNorm1d(3)


def arguments(*tensors):
    return lambda _, number: (copied(tensors, number), {})


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def verdict(compile_it, make=lambda: product):
    given = arguments(leaf(3), leaf(3)) if make is not normed else arguments(leaf(2, 3))
    return play("made up", make, with_passes(given), compile_it).verdict


def detaching(program):
    return lambda x, y: tuple(out.detach().requires_grad_() for out in program(x, y))


def rounding(program):
    return lambda x, y: tuple(out * (1 + 2e-7) for out in program(x, y))


def writing_zeros(program):
    """Have gradients that are absent in eager come back as zeros."""

    def call(x, y):
        first, second = program(x, y)
        return first, second + 0 * y.sum()

    return call


def keeping_the_first_tangent(program):
    kept = []

    class Stale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, tangent):
            kept.append(tangent)
            return kept[0]

    return lambda x, y: (Stale.apply(program(x, y)[0]), program(x, y)[1])


def ignoring_strides(program):
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, tangent):
            return torch.as_strided(tangent, tangent.shape, [min(s, 1) for s in tangent.stride()])

    return lambda x, y: (Flat.apply(program(x, y)[0]), program(x, y)[1])


def freeing_what_was_saved(program):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            ctx.saved = [torch.ones(())]
            return out.clone()

        @staticmethod
        def backward(ctx, tangent):
            return tangent * ctx.saved.pop()

    return lambda x, y: tuple(map(Once.apply, program(x, y)))


def scaling_what_reaches_one(program):
    return lambda x, y: program(x, y * 1.0 + (y * 1e-3 - (y * 1e-3).detach()))


LIES = {
    "an output cut off": detaching,
    "zeros where eager has no gradient": writing_zeros,
    "the gradient of another call": keeping_the_first_tangent,
    "strides of a tangent that are ignored": ignoring_strides,
    "a gradient off by a thousandth": scaling_what_reaches_one,
}


@pytest.mark.parametrize("name", LIES)
def test_finds(name):
    assert verdict(LIES[name]) == WRONG


def test_finds_a_backward_pass_that_runs_only_once():
    assert verdict(freeing_what_was_saved) == CRASH


def test_finds_buffers_that_move_twice():
    def moving_twice(module):
        return lambda x: (module(x.detach()), module(x))[1]

    assert verdict(moving_twice, normed) == WRONG


def test_tells_rounding_from_what_is_wrong():
    assert verdict(rounding) == ROUNDED


def test_finds_a_refusal():
    def refusing(program):
        def call(x, y):
            raise NotServed("no")

        return call

    assert verdict(refusing) == REFUSED


def test_tells_what_eager_raises_too():
    def raising():
        def program(x, y):
            raise ValueError("always")

        return program

    assert play("made up", raising, with_passes(arguments(leaf(3), leaf(3)))).verdict == RAISED


def test_gives_odd_calls_other_values_in_the_same_layout():
    one = torch.randn(2, 1, 6)[..., ::2].expand(2, 4, 3).requires_grad_()
    even, odd = copied(one, 0), copied(one, 1)
    assert torch.equal(even, one)
    assert torch.equal(odd, one * 0.875)
    assert even.stride() == odd.stride() == one.stride()
    assert odd.is_leaf
    assert odd.requires_grad


def test_copies_a_tensor_that_is_passed_twice_once():
    x = leaf(2)
    first, second = copied((x, x), 1)
    assert first is second


@pytest.mark.parametrize("make", [dense, strided, expanded, lazy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_makes_tangents_of_the_output_s_form(make, dtype):
    output = torch.empty(3, 4, dtype=dtype)
    tangent = make(output, torch.Generator().manual_seed(0))
    assert (tangent.shape, tangent.dtype) == (output.shape, dtype)
    assert tangent.is_contiguous() == (make in (dense, lazy))
    assert (tangent.is_conj() or tangent.is_neg()) == (make is lazy)


def test_leaves_an_output_out_of_the_loss():
    x, y = leaf(3), leaf(3)
    Pass(outputs=slice(1, None)).run((x * 2, y * 2), (x, y), 0)
    assert x.grad is None
    assert y.grad is not None


def test_tries_each_kind_of_tangent():
    kinds = Counter(one.tangent for one in PASSES)
    assert kinds.keys() == {dense, strided, expanded, lazy}


def test_spreads_a_sample_over_what_there_is():
    assert spread(range(10), 2) == [0, 5]
    assert spread(range(2), 3) == [0, 1]


def test_counts_by_verdict_and_reason():
    trials = [
        Trial("a", EXACT),
        Trial("b", EAGERLY, ("'x' is no operator at /somewhere.py:3",)),
        Trial("c", EAGERLY, ("'y' is no operator at /elsewhere.py:4",)),
        Trial("d", WRONG, ("a value",)),
    ]
    text = table("made up", trials)
    assert share_from_graphs(trials) == pytest.approx(1 / 3)
    assert "4 programs, 33.3% from graphs" in text
    assert "2 eagerly: … is no operator…" in text
    assert "d: wrong: a value" in text
