"""The catalogue's own checks: each kind of lie is found out."""

from __future__ import annotations

import pytest
import torch
from scenarios import compare, play_compiled, play_eagerly
from scenarios._facts import Ledger, differences
from scenarios._scenario import CRASH, REFUSED, RIGHT, WRONG, Scenario, calls, change, normal

from torchbay.errors import InvalidArgument, NotServed

STEPS = (*calls(normal(3), times=2), change(lambda world: world.append(1)), *calls(normal(3)))


def scenario_of(make, steps=STEPS):
    return Scenario("is made up", "harness", make, steps, frozenset({RIGHT}), 8, (), {})


def adding():
    weights = [1.0]

    def program(x):
        x.add_(len(weights))
        return x * 2

    from scenarios._scenario import Program

    return Program(program, weights)


def verdict(compile_it, make=adding):
    scenario = scenario_of(make)
    return compare(play_eagerly(scenario), play_compiled(scenario, compile_it)).verdict


def returning(other):
    """Make a compiler whose programs return something else than the program itself."""
    return lambda program: lambda x: other(program(x), x)


def keeping_the_first(program):
    kept = []

    def call(x):
        kept.append(program(x))
        return kept[0]

    return call


def drawing(program):
    return lambda x: (torch.rand(1), program(x))[1]


def printing(program):
    return lambda x: (print("called"), program(x))[1]


def leaving_grad_mode_on(program):
    return lambda x: (program(x), torch.set_grad_enabled(True))[0]


LIES = {
    "a stale result": keeping_the_first,
    "other values": returning(lambda result, x: result + 1e-6),
    "negative zeros": returning(lambda result, x: result * torch.tensor([1.0, 1.0, -0.0])),
    "another dtype": returning(lambda result, x: result.double()),
    "other strides": returning(lambda result, x: torch.empty(6)[::2].copy_(result)),
    "another structure": returning(lambda result, x: [result]),
    "an alias of the input": returning(lambda result, x: x.copy_(result)),
    "an input that is not written": lambda program: lambda x: program(x.clone()),
    "an input written twice": lambda program: lambda x: program(x.add_(1)),
    "a random number too many": drawing,
    "a line too many": printing,
    "grad mode left on": leaving_grad_mode_on,
}


@pytest.mark.parametrize("name", LIES)
def test_finds(name):
    assert verdict(LIES[name]) == WRONG


def test_finds_nothing_where_nothing_is_wrong():
    assert verdict(lambda program: program) == RIGHT


def test_finds_a_crash():
    def crashing(program):
        return lambda x: 1 / 0

    assert verdict(crashing) == CRASH


def test_tells_a_refusal_from_one_that_comes_too_late():
    def refusing(program):
        raise InvalidArgument("no")

    def refusing_calls(program):
        def call(x):
            raise NotServed("no")

        return call

    def refusing_too_late(program):
        def call(x):
            program(x)
            raise NotServed("no")

        return call

    assert verdict(refusing) == verdict(refusing_calls) == REFUSED
    assert verdict(refusing_too_late) == WRONG


def test_numbers_tensors_and_memory_by_first_appearance():
    def facts(make):
        return Ledger().facts("value", make())

    def aliased():
        x = torch.ones(3)
        return [x, x[1:], x]

    def apart():
        x = torch.ones(3)
        return [x, x[1:].clone(), x]

    def copied():
        x = torch.ones(3)
        return [x, x[1:], x[:]]

    assert differences(facts(aliased), facts(aliased), 0.0) == []
    assert any("storage" in text for text in differences(facts(aliased), facts(apart), 0.0))
    assert any("identity" in text for text in differences(facts(aliased), facts(copied), 0.0))
