"""Random numbers: drawn in the order of eager, from the generators as they stand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from scenarios._scenario import Program, calls, change, normal, scenario

X = normal(8)


@scenario(calls(X), at_most=1)
def draws_the_mask_of_a_dropout():
    return lambda x: functional.dropout(x, 0.5)


@scenario(calls(X), at_most=1)
def draws_two_dropouts_in_order():
    return lambda x: functional.dropout(functional.dropout(x, 0.3) + 1, 0.5)


@scenario(calls(X), at_most=1)
def draws_from_several_distributions():
    return lambda x: (torch.rand_like(x), torch.randn(3), torch.randint(0, 9, (4,)), x + 1)


@scenario(calls(X), at_most=1)
def draws_a_permutation():
    return lambda x: x[torch.randperm(8)]


@scenario(calls(X), at_most=1)
def draws_into_an_input():
    return lambda x: x.normal_(1.0, 2.0)


@scenario(calls(X), at_most=1)
def draws_samples():
    return lambda x: (torch.multinomial(x.sigmoid(), 3), torch.bernoulli(x.sigmoid()))


@scenario(calls(X), at_most=1)
def draws_what_nobody_uses():
    def program(x):
        torch.rand(5)
        return x + torch.rand(8)

    return program


@scenario(calls(normal(1, 2, 4, 8)), at_most=1)
def draws_the_mask_of_attention():
    return lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


@scenario(calls(X), change(lambda net: net.eval()), calls(X), at_most=2)
def stops_drawing_in_evaluation():
    return nn.Sequential(nn.Dropout(0.5), nn.RReLU()).train()


@scenario(calls(X), change(lambda net: setattr(net[0], "p", 0.1)), calls(X), at_most=2)
def follows_the_rate_of_a_dropout():
    return nn.Sequential(nn.Dropout(0.5)).train()


@scenario(calls(X), change(lambda _: torch.manual_seed(7)), calls(X), at_most=1)
def follows_a_seed_set_between_calls():
    return lambda x: x + torch.randn(8)


@scenario(calls(X), eagerly=True)
def sets_a_seed_on_every_call():
    def program(x):
        torch.manual_seed(3)
        return x + torch.randn(8)

    return program


@scenario(calls(X), eagerly=True)
def draws_from_a_generator_of_its_own():
    generator = torch.Generator()
    generator.manual_seed(5)
    return Program(lambda x: x + torch.randn(8, generator=generator), None)


@scenario(calls(X), eagerly=True)
def branches_on_a_random_number():
    return lambda x: x * 2 if torch.rand(()) > 0.5 else x * 3


@scenario(calls(X), change(lambda _: torch.manual_seed(12)), calls(X), eagerly=True)
def follows_a_seed_that_it_reads():
    return lambda x: x * (torch.initial_seed() % 7)


@scenario(calls(X), eagerly=True)
def leaves_the_generator_as_it_was_around_a_fork():
    def program(x):
        with torch.random.fork_rng(devices=[]):
            inner = torch.rand(8)
        return x + inner, torch.rand(8)

    return program
