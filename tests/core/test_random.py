"""Random numbers: eager's stream, drawn once per call, from the generators as they stand."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import torchbay

DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.5, True),
    "two dropouts": lambda x: functional.dropout(functional.dropout(x, 0.3, True) + 1, 0.5, True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(8),
    "randint": lambda x: x + torch.randint(0, 10, (8,)),
    "randperm": lambda x: x[torch.randperm(8)],
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.sigmoid(), 3),
    "normal": lambda x: torch.normal(x, x.abs()),
    "uniform_": lambda x: torch.empty(8).uniform_(-1, 1) * x,
    "exponential_": lambda x: torch.empty(8).exponential_() * x,
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel": lambda x: functional.gumbel_softmax(x, hard=True),
    "dropout2d": lambda x: functional.dropout2d(x.view(1, 8, 1, 1), 0.5, True),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, True),
    "poisson": lambda x: torch.poisson(x.abs()),
    "unused": lambda x: (torch.rand(3), x + torch.rand(8))[1],
    "only unused": lambda x: (torch.rand(3), x)[1],
    "in-place and unused": lambda x: (torch.empty(3).normal_(), x + 1)[1],
    "interleaved": lambda x: (torch.rand(1), torch.randn(2), x * torch.rand(8), torch.randperm(3)),
    "transposed dropout": lambda x: functional.dropout(x.view(2, 4).t(), 0.5, True),
    "transposed normal_": lambda x: torch.empty(2, 4).t().normal_(),
    "transposed uniform_": lambda x: torch.empty(2, 4).t().uniform_() * 2,
    "transposed exponential_": lambda x: torch.empty(2, 4).t().exponential_() * 2,
    "strided normal_": lambda x: x.clone()[::2].normal_() * 2,
    "channels last": lambda x: functional.dropout(
        x.view(1, 2, 2, 2).to(memory_format=torch.channels_last), 0.5, True
    ),
    "expanded rand_like": lambda x: torch.rand_like(x.view(2, 4).t()),
    "attention": lambda x: functional.scaled_dot_product_attention(
        *[x.view(1, 2, 2, 2)] * 3, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_the_stream_of_eager(name, recording):
    function, x = DRAWS[name], torch.randn(8)
    compiled = torchbay.compile(function, backend=recording)
    torch.manual_seed(1)
    found = [compiled(x) for _ in range(4)] + [torch.rand(2)]
    torch.manual_seed(1)
    expected = [function(x) for _ in range(4)] + [torch.rand(2)]
    for one, other in zip(found, expected, strict=True):
        ones, others = (v if isinstance(v, tuple) else (v,) for v in (one, other))
        assert all(map(torch.equal, ones, others))
    assert torchbay.explain(compiled).calls == {"graph": 3, "eager": 1}


def test_draws_the_stream_of_eager_in_a_module(recording):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.2))
    compiled = torchbay.compile(module, backend=recording)
    x = torch.randn(2, 4)
    torch.manual_seed(1)
    found = [compiled(x) for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(one, module(x)) for one in found)


def test_leaves_the_stream_alone_while_it_compiles(recording):
    compiled = torchbay.compile(lambda x: x + 1, backend=recording)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # noqa: NPY002 - what libraries use
    compiled(torch.ones(1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[2] == before[2]  # noqa: NPY002


def seeds_again(x):
    torch.manual_seed(0)
    return x * torch.rand(2)


def seeds_otherwise(x):
    torch.random.default_generator.manual_seed(5)
    return x * torch.rand(2)


STATE = torch.Generator().manual_seed(9).get_state()


def restores_a_state(x):
    torch.set_rng_state(STATE)
    return x * torch.rand(2)


def forks(x):
    with torch.random.fork_rng():
        noise = torch.rand(2)
    return x * noise


def forks_and_seeds(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.rand(2)
    return x * noise


def restores_by_hand(x):
    state = torch.get_rng_state()
    noise = torch.rand(2)
    torch.set_rng_state(state)
    return x * noise


@pytest.mark.parametrize(
    "function",
    [seeds_again, seeds_otherwise, restores_a_state, forks, forks_and_seeds, restores_by_hand],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_never_loses_a_seed_set_inside(function, seed, recording):
    compiled = torchbay.compile(function, backend=recording)
    torch.manual_seed(seed)
    found = [compiled(torch.ones(2)) for _ in range(4)] + [torch.rand(2)]
    torch.manual_seed(seed)
    expected = [function(torch.ones(2)) for _ in range(4)] + [torch.rand(2)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("place", ["argument", "closure"])
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_draws_from_a_generator_of_the_users(place, recording):
    def stream(compile_it):
        generator = torch.Generator().manual_seed(4)
        if place == "argument":
            function = compile_it(lambda x, g: x * torch.rand(2, generator=g))
            return [function(torch.ones(2), generator) for _ in range(4)]
        function = compile_it(lambda x: x * torch.rand(2, generator=generator))
        return [function(torch.ones(2)) for _ in range(4)]

    found = stream(lambda f: torchbay.compile(f, backend=recording))
    assert all(map(torch.equal, found, stream(lambda f: f)))


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_serves_another_generator_of_the_users(recording):
    compiled = torchbay.compile(lambda x, g: x * torch.rand(2, generator=g), backend=recording)
    for seed in (1, 1, 2, 2, 1):
        generator, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2), generator), torch.rand(2, generator=other))


OWN, OWN_OF_NUMPY = random.Random(3), np.random.RandomState(3)

PYTHONS = {
    "random scalar": lambda x: x * random.random(),
    "random literal": lambda x: x * torch.tensor(random.random()),
    "random branch": lambda x: x * 2 if random.random() > 0.5 else x * 3,
    "random size": lambda x: torch.zeros(random.randint(1, 5)),
    "random choice": lambda x: x + random.choice([1, 2, 3]),
    "own Random": lambda x, own=OWN: x * own.random(),
    "numpy scalar": lambda x: x * float(np.random.rand()),  # noqa: NPY002
    "numpy branch": lambda x: x * 2 if np.random.rand() > 0.5 else x * 3,  # noqa: NPY002
    "numpy tensor": lambda x: x * torch.tensor(np.random.rand(2)),  # noqa: NPY002
    "shuffle": lambda x: x + random.sample(range(9), 3)[0],
    "numpy generator": lambda x, own=OWN_OF_NUMPY: x * own.randint(1, 9),
    "numpy generator size": lambda x, own=OWN_OF_NUMPY: torch.zeros(own.randint(1, 3)),
}


@pytest.mark.parametrize("name", PYTHONS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_follows_the_randomness_of_python(name, seed, recording):
    function = PYTHONS[name]

    def stream(callable_):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        if function.__defaults__:
            function.__defaults__[0].seed(seed)
        return [callable_(torch.ones(2)) for _ in range(6)]

    found = stream(torchbay.compile(function, backend=recording))
    assert all(map(torch.equal, found, stream(function)))
