"""Everything a graph relied on is checked: what changed leads to a recompile, never to a stale result."""

from __future__ import annotations

import contextlib
import decimal
import functools
import io
import logging
import math
import pathlib
import queue
import re
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

import torchbay


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def check(compiled, original, *args, rounds=2):
    for _ in range(rounds):
        assert torch.equal(compiled(*args), original(*args))


TENSORS = {
    "size": lambda: torch.ones(4),
    "rank": lambda: torch.ones(1, 3),
    "stride": lambda: torch.ones(6)[::2],
    "transposed": lambda: torch.ones(3, 3).t(),
    "square": lambda: torch.ones(3, 3),
    "dtype": lambda: torch.ones(3, dtype=torch.float64),
    "int": lambda: torch.ones(3, dtype=torch.int64),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "scalar": lambda: torch.ones(()),
    "empty": lambda: torch.ones(0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_recompiles_for_a_tensor_with_another(name, recording):
    def call(x):
        return x.clone() * (2 if x.is_contiguous() else 3) + x.dim() + x.requires_grad * 10

    compiled = torchbay.compile(call, backend=recording)
    plain, other = torch.ones(3), TENSORS[name]()
    for _ in range(2):
        check(compiled, call, plain, rounds=1)
        check(compiled, call, other, rounds=1)
    assert served(compiled) == {"graph": 2, "eager": 2}


def test_serves_inference_tensors_beside_normal_ones(recording):
    """https://github.com/pytorch/pytorch/issues/148983"""
    compiled = torchbay.compile(lambda x: x * 2, backend=recording)
    with torch.inference_mode():
        made_there = torch.ones(3)
    for _ in range(2):
        check(compiled, compiled.original, made_there, rounds=1)
        check(compiled, compiled.original, torch.ones(3), rounds=1)
    assert "made in inference mode" in " ".join(torchbay.explain(compiled).recompiles[0])


def mode_is_on():
    return float(torch.is_grad_enabled()) + 2 * torch.is_inference_mode_enabled()


AMBIENT = {
    "grad mode": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast dtype": lambda: torch.autocast("cpu", torch.float16),
    "default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("name", AMBIENT)
def test_recompiles_under_another(name, recording):
    weight = torch.randn(3, 3)

    def call(x):
        return x @ weight + mode_is_on()

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(2):
        for around in (contextlib.nullcontext, AMBIENT[name], torch.no_grad):
            with around():
                x = torch.ones(3, 3)
                found, expected = compiled(x), call(x)
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype


def test_serves_after_eager_filled_the_autocast_cache(recording):
    module = nn.Linear(3, 3)
    compiled = torchbay.compile(module, backend=recording)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(torch.ones(3))
        for _ in range(3):
            assert torch.equal(compiled(torch.ones(3)), expected)
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_recompiles_for_another_default_dtype(recording):
    compiled = torchbay.compile(lambda x: x + torch.ones(2), backend=recording)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert compiled(torch.ones(2, dtype=torch.int64)).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)
    assert served(compiled) == {"graph": 1, "eager": 2}


def test_recompiles_for_deterministic_algorithms(recording):
    compiled = torchbay.compile(
        lambda x: x + torch.are_deterministic_algorithms_enabled(), backend=recording
    )
    for setting in (False, True, False, True):
        torch.use_deterministic_algorithms(setting)
        try:
            assert compiled(torch.ones(1)).item() == 1 + setting
        finally:
            torch.use_deterministic_algorithms(False)
    assert served(compiled) == {"graph": 2, "eager": 2}


class Config:
    def __init__(self):
        self.scale = 2.0
        self.inner = types.SimpleNamespace(scale=1.0)


class Block(nn.Module):
    default = 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)
        self.scale = 2.0
        self.scale_0 = 1.0
        self.config = Config()
        self.sizes = [1.0, 2.0]
        self.table = {"a": 1.0}
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.options = types.SimpleNamespace(offset=0.0)
        self.activation = torch.relu

    @property
    def doubled(self):
        return self.scale * 2

    def forward(self, x):
        x = self.activation(self.linear(x)) * self.doubled + self.options.offset
        for size in self.sizes:
            x = x * size
        for value in self.table.values():
            x = x + value
        for block in self.blocks:
            x = block(x)
        x = x * self.config.scale * self.config.inner.scale * self.default
        x = x * getattr(self, "optional", 1.0) * getattr(self, f"scale_{0}")
        return (
            x
            + self.training
            + self.drop.training * 10
            + (self.late if hasattr(self, "late") else 0)
        )


class Twice(nn.Module):
    def forward(self, x):
        return x * 2


CHANGES = {
    "training flag": lambda m: m.eval(),
    "training flag of a submodule": lambda m: m.drop.eval(),
    "scalar attribute": lambda m: setattr(m, "scale", 3.0),
    "scalar attribute read by a computed name": lambda m: setattr(m, "scale_0", 3.0),
    "attribute of a config": lambda m: setattr(m.config, "scale", 3.0),
    "attribute of a nested config": lambda m: setattr(m.config.inner, "scale", 3.0),
    "config": lambda m: (setattr(m, "config", Config()), setattr(m.config, "scale", 5.0)),
    "attribute of a namespace": lambda m: setattr(m.options, "offset", 3.0),
    "element of a list": lambda m: m.sizes.__setitem__(0, 5.0),
    "longer list": lambda m: m.sizes.append(5.0),
    "shorter list": lambda m: m.sizes.pop(),
    "value of a dict": lambda m: m.table.update(a=5.0),
    "larger dict": lambda m: m.table.update(b=5.0),
    "longer module list": lambda m: m.blocks.append(nn.Linear(3, 3)),
    "shorter module list": lambda m: m.blocks.__delitem__(0),
    "submodule": lambda m: setattr(m, "linear", Twice()),
    "submodule of a list": lambda m: m.blocks.__setitem__(0, Twice()),
    "function": lambda m: setattr(m, "activation", torch.tanh),
    "instance attribute over a class attribute": lambda m: setattr(m, "default", 5.0),
    "attribute that was absent": lambda m: setattr(m, "optional", 5.0),
    "attribute asked for with hasattr": lambda m: setattr(m, "late", 5.0),
    "forward of the instance": lambda m: setattr(m, "forward", lambda x: x * 7),
    "forward of a submodule": lambda m: setattr(m.linear, "forward", lambda x: x * 7),
    "parameter": lambda m: setattr(m.linear, "weight", nn.Parameter(torch.ones(3, 3))),
    "parameter's data": lambda m: m.linear.weight.zero_(),
    "removed bias": lambda m: setattr(m.linear, "bias", None),
    "forward hook": lambda m: m.register_forward_hook(lambda module, args, out: out * 7),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 7,)),
    "hook of a submodule": lambda m: m.linear.register_forward_hook(
        lambda module, args, out: out * 7
    ),
    "precision": lambda m: m.double().float(),
    "frozen weights": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_sees_another(name, recording):
    torch.manual_seed(0)
    module = Block()
    compiled = torchbay.compile(module, backend=recording)
    x = torch.randn(2, 3)
    check(compiled, module, x)
    assert served(compiled) == {"graph": 1, "eager": 1}
    CHANGES[name](module)
    check(compiled, module, x)


def test_sees_another_class_attribute(recording):
    """https://github.com/pytorch/pytorch/issues/176851"""
    compiled = torchbay.compile(lambda x: x * Block.default, backend=recording)
    check(compiled, compiled.original, torch.ones(2))
    Block.default = 10.0
    try:
        check(compiled, compiled.original, torch.ones(2))
    finally:
        Block.default = 1.0


def test_sees_hooks_of_every_module(recording):
    module = nn.Linear(3, 3)
    compiled = torchbay.compile(module, backend=recording)
    check(compiled, module, torch.ones(3))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 7)
    try:
        check(compiled, module, torch.ones(3))
    finally:
        handle.remove()
    check(compiled, module, torch.ones(3))


def test_compiles_anew_for_a_bias_that_was_none(recording):
    module = nn.Linear(3, 3, bias=False)
    compiled = torchbay.compile(module, backend=recording)
    check(compiled, module, torch.ones(3))
    module.bias = nn.Parameter(torch.ones(3))
    check(compiled, module, torch.ones(3))
    module.bias = None
    check(compiled, module, torch.ones(3))
    assert served(compiled) == {"graph": 4, "eager": 2}


def test_recompiles_once_for_half(recording):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    compiled = torchbay.compile(module, backend=recording)
    check(compiled, module, torch.ones(2, 3))
    assert compiled.to(torch.bfloat16) is compiled
    check(compiled, module, torch.ones(2, 3, dtype=torch.bfloat16))
    assert served(compiled) == {"graph": 2, "eager": 2}


SCALE = 2.0
TENSOR = torch.ones(3)
TABLE = {"factor": [2.0]}
settings = types.ModuleType("settings")
settings.scale = 2.0


def helper(x):
    return x * SCALE


@torch.no_grad()
def decorated_helper(x):
    return x * SCALE


partial_helper = functools.partial(torch.mul, other=2.0)
module_helper = nn.Linear(3, 3)

GLOBALS = {
    "scalar": (lambda x: x * SCALE, ("SCALE", 3.0)),
    "scalar of a helper": (lambda x: helper(x), ("SCALE", 3.0)),
    "scalar of a decorated helper": (lambda x: decorated_helper(x), ("SCALE", 3.0)),
    "tensor": (lambda x: x * TENSOR, ("TENSOR", torch.full((3,), 5.0))),
    "dict": (lambda x: x * TABLE["factor"][0], ("TABLE", {"factor": [3.0]})),
    "helper": (lambda x: helper(x), ("helper", lambda x: x * 7)),
    "decorated helper": (lambda x: decorated_helper(x), ("decorated_helper", lambda x: x * 7)),
    "partial": (
        lambda x: partial_helper(x),
        ("partial_helper", functools.partial(torch.mul, other=3.0)),
    ),
    "module": (lambda x: module_helper(x), ("module_helper", nn.Linear(3, 3))),
    "class": (lambda x: Twice()(x), ("Twice", nn.Tanh)),
    "Python module": (lambda x: x * settings.scale, ("settings", types.SimpleNamespace(scale=7.0))),
}


@pytest.mark.parametrize("name", GLOBALS)
def test_sees_another_global(name, recording, monkeypatch):
    function, (variable, value) = GLOBALS[name]
    compiled = torchbay.compile(function, backend=recording)
    check(compiled, function, torch.ones(3))
    assert served(compiled) == {"graph": 1, "eager": 1}
    monkeypatch.setitem(globals(), variable, value)
    check(compiled, function, torch.ones(3))


def test_sees_values_inside_globals(recording, monkeypatch):
    def call(x):
        return x * TABLE["factor"][0] * settings.scale

    compiled = torchbay.compile(call, backend=recording)
    check(compiled, call, torch.ones(3))
    monkeypatch.setitem(TABLE, "factor", [5.0])
    check(compiled, call, torch.ones(3))
    monkeypatch.setattr(settings, "scale", 5.0)
    check(compiled, call, torch.ones(3))


@pytest.mark.parametrize(
    "decorate", [lambda f: f, torch.no_grad(), functools.lru_cache, torch.inference_mode()]
)
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_sees_rebound_closures(decorate, recording):
    factor, weight, module = 2.0, torch.ones(3), nn.Linear(3, 3)

    @decorate
    def inner(x):
        return module(x) * factor + weight

    def call(x):
        return inner(x.clone())

    compiled = torchbay.compile(call, backend=recording)
    check(compiled, call, torch.ones(3))
    factor = 3.0
    check(compiled, call, torch.ones(3))
    weight = torch.full((3,), 9.0)
    check(compiled, call, torch.ones(3))
    weight.fill_(4)
    check(compiled, call, torch.ones(3))
    module = nn.Linear(3, 3)
    check(compiled, call, torch.ones(3))


def test_serves_closures_under_decorators_of_torch(recording):
    weight = torch.ones(3)

    @torch.no_grad()
    def call(x):
        return x * weight

    compiled = torchbay.compile(call, backend=recording)
    check(compiled, call, torch.ones(3))
    assert served(compiled) == {"graph": 1, "eager": 1}


def test_sees_what_a_compiled_function_inside_reads(recording):
    factor = 2.0
    inner = torchbay.compile(lambda x: x * factor, backend=recording)

    def outer(x):
        return inner(x) + 1

    compiled = torchbay.compile(outer, backend=recording)
    check(compiled, outer, torch.ones(3))
    factor = 5.0
    assert compiled(torch.ones(1)).item() == 6


def test_sees_other_defaults(recording):
    def call(x, factor=2.0):
        return x * factor

    compiled = torchbay.compile(call, backend=recording)
    check(compiled, call, torch.ones(3))
    call.__defaults__ = (5.0,)
    check(compiled, call, torch.ones(3))


def test_sees_other_arguments_of_a_callable_object(recording):
    class Scaler:
        def __init__(self):
            self.factor = 2.0

        def __call__(self, x):
            return x * self.factor

    scaler = Scaler()
    compiled = torchbay.compile(scaler, backend=recording)
    check(compiled, scaler, torch.ones(3))
    scaler.factor = 5.0
    check(compiled, scaler, torch.ones(3))


def test_ignores_what_the_call_does_not_read(recording):
    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.stats = {"seen": 0}
            self.history = [0]
            self.note = 0

        def forward(self, x):
            return self.linear(x)

    module = Noted()
    compiled = torchbay.compile(module, backend=recording)
    for step in range(12):
        check(compiled, module, torch.ones(3), rounds=1)
        module.stats["seen"] = module.note = module.history[0] = step
        module.history.append(step)
    assert served(compiled) == {"graph": 11, "eager": 1}


logger = logging.getLogger(__name__)
PATTERN = re.compile("a+")


class Equipped(nn.Module):
    """Holds what models hold besides weights, and reads some of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.lock = threading.Lock()
        self.rng = np.random.default_rng(0)
        self.generator = torch.Generator()
        self.file = io.StringIO("text")
        self.queue = queue.Queue()
        self.names = {"a", "b"}
        self.table = np.ones(3)
        self.iterator = iter([1])
        self.activation = functools.partial(torch.clamp, min=0.0)
        self.pattern = re.compile("b+")
        self.kind = np.float32
        self.choices = frozenset({"a"})
        self.path = pathlib.Path("model")
        self.dtype = torch.float32
        self.scale = decimal.Decimal(2)

    def unused(self):
        return self.rng, self.file, self.queue, self.table, self.iterator, self.generator

    def forward(self, x):
        with self.lock:
            logger.debug("called with %s", x.shape)
            y = self.activation(self.linear(x).to(self.dtype)) * float(self.scale)
        if (
            "a" in self.names
            and "a" in self.choices
            and PATTERN.match("aa")
            and self.pattern.match("b")
        ):
            y = y * math.sqrt(4) + np.pi + len(self.path.name) + int(self.kind is np.float32)
        return y


def test_serves_modules_that_hold_more_than_weights(recording):
    module = Equipped()
    compiled = torchbay.compile(module, backend=recording)
    check(compiled, module, torch.ones(3), rounds=3)
    assert served(compiled) == {"graph": 2, "eager": 1}


def test_names_the_value_compiled_for_and_the_value_seen(recording):
    compiled = torchbay.compile(lambda x, k: x * k, backend=recording)
    compiled(torch.ones(2), 2)
    compiled(torch.ones(2), 3)
    compiled(torch.ones(5), 3)
    by_value, by_size = torchbay.explain(compiled).recompiles
    assert by_value == ("k: compiled for 2, seen 3",)
    assert "[2]" in by_size[0]
    assert "[5]" in by_size[0]


def test_undoes_tied_weights(recording):
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    compiled = torchbay.compile(module, backend=recording)
    check(compiled, module, torch.ones(3))
    second.weight = nn.Parameter(torch.ones(3, 3))
    check(compiled, module, torch.ones(3))
    assert served(compiled) == {"graph": 2, "eager": 2}
