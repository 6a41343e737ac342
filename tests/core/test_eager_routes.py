"""Calls no graph can serve run eagerly: right on every call, with one warning that says why."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import itertools
import logging
import os
import pickle
import queue
import threading
import time
import warnings
import weakref
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def run_quietly(compiled, *args, times=10):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.TorchbayWarning)
        return [compiled(*args) for _ in range(times)]


def holds_no_fake(values):
    return all(type(value) is torch.Tensor for value in values)


ONE = torch.ones(1)
COUNT = 0
LOG = []


def bump():
    global COUNT
    COUNT += 1


class CountsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        return x + 1


class CountsOnItsClass(nn.Module):
    n = 0

    def forward(self, x):
        type(self).n += 1
        return x + 1


class LogsGlobally(nn.Module):
    def forward(self, x):
        LOG.append(x + 1)
        return x + 2


class Slotted:
    __slots__ = ("n",)


@pytest.fixture(autouse=True)
def fresh():
    global COUNT
    COUNT = CountsOnItsClass.n = 0
    LOG.clear()


def test_counts_right_on_the_module(recording):
    """https://github.com/pytorch/pytorch/issues/128319"""
    module = CountsItself()
    run_quietly(torchbay.compile(module, backend=recording), ONE)
    assert module.n == 10
    assert len(recording.requests) <= 2


def test_counts_right_on_the_class(recording):
    run_quietly(torchbay.compile(CountsOnItsClass(), backend=recording), ONE)
    assert CountsOnItsClass.n == 10


def test_counts_right_in_a_global(recording):
    run_quietly(torchbay.compile(lambda x: (bump(), x + 1)[1], backend=recording), ONE)
    assert COUNT == 10


def counters():
    cell = 0

    def closure(x):
        nonlocal cell
        cell += 1
        return x + 1

    box, table, numbers, slotted, array = (
        [0],
        {"n": 0},
        collections.Counter(),
        Slotted(),
        np.zeros(1),
    )
    slotted.n = 0

    def in_list(x):
        box[0] += 1
        return x + 1

    def in_dict(x):
        table["n"] += 1
        return x + 1

    def in_counter(x):
        numbers["n"] += 1
        return x + 1

    def in_slots(x):
        slotted.n += 1
        return x + 1

    def in_array(x):
        array[0] += 1
        return x + 1

    def on_function(x):
        on_function.n += 1
        return x + 1

    on_function.n = 0
    return {
        "closure": (closure, lambda: cell),
        "list": (in_list, lambda: box[0]),
        "dict": (in_dict, lambda: table["n"]),
        "Counter": (in_counter, lambda: numbers["n"]),
        "slots": (in_slots, lambda: slotted.n),
        "numpy": (in_array, lambda: array[0]),
        "function": (on_function, lambda: on_function.n),
    }


@pytest.mark.parametrize("place", counters())
def test_counts_right_in(place, recording):
    function, count = counters()[place]
    found = run_quietly(torchbay.compile(function, backend=recording), ONE)
    assert count() == 10
    assert all(value.item() == 2 for value in found)


def collectors():
    kinds = {
        "list": [],
        "deque": collections.deque(),
        "set": set(),
        "dict": {},
        "ring": collections.deque(maxlen=2),
    }
    return {
        "list": (kinds["list"], kinds["list"].append, 10),
        "deque": (kinds["deque"], kinds["deque"].append, 10),
        "ring": (kinds["ring"], kinds["ring"].append, 2),
        "set": (kinds["set"], kinds["set"].add, 10),
        "dict": (kinds["dict"], lambda value: kinds["dict"].__setitem__(value, 1), 10),
    }


@pytest.mark.parametrize("kind", collectors())
def test_collects_every_tensor_in_a(kind, recording):
    collected, add, expected = collectors()[kind]

    def call(x):
        y = x + 1
        add(y)
        return y

    run_quietly(torchbay.compile(call, backend=recording), ONE)
    assert len(collected) == expected
    assert holds_no_fake(collected)


def test_collects_every_tensor_in_a_queue(recording):
    collected = queue.Queue()

    def call(x):
        y = x + 1
        collected.put(y)
        return y

    run_quietly(torchbay.compile(call, backend=recording), ONE)
    assert collected.qsize() == 10
    assert holds_no_fake(collected.queue)


def test_takes_every_item_from_a_queue(recording):
    numbers = queue.Queue()
    for number in range(9):
        numbers.put(number)
    compiled = torchbay.compile(lambda x: x * numbers.get(), backend=recording)
    assert [value.item() for value in run_quietly(compiled, ONE, times=5)] == [0, 1, 2, 3, 4]


def test_sets_an_event_on_every_call(recording):
    event = threading.Event()
    compiled = torchbay.compile(lambda x: (event.set(), x + 1)[1], backend=recording)
    for _ in range(4):
        event.clear()
        run_quietly(compiled, ONE, times=1)
        assert event.is_set()


def test_keeps_what_is_stored_under_a_weak_key(recording):
    owner, stored = nn.Linear(1, 1), weakref.WeakKeyDictionary()

    def call(x):
        stored[owner] = x + 1
        return x

    compiled = torchbay.compile(call, backend=recording)
    for value in (1.0, 2.0, 3.0, 4.0):
        run_quietly(compiled, torch.full((1,), value), times=1)
        assert type(stored[owner]) is torch.Tensor
        assert stored[owner].item() == value + 1


def test_collects_every_tensor_in_a_global_list(recording):
    run_quietly(torchbay.compile(LogsGlobally(), backend=recording), ONE)
    assert len(LOG) == 10
    assert holds_no_fake(LOG)


def test_collects_every_activation_of_a_hook(recording):
    seen = []
    module = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    module[0].register_forward_hook(lambda module, args, out: seen.append(out))
    run_quietly(torchbay.compile(module, backend=recording), ONE)
    assert len(seen) == 10
    assert holds_no_fake(seen)


def test_keeps_hidden_state(recording):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.zeros(1)

        def forward(self, x):
            self.state = self.state + x
            return self.state * 2

    module = Recurrent()
    found = run_quietly(torchbay.compile(module, backend=recording), ONE, times=5)
    assert [value.item() for value in found] == [2, 4, 6, 8, 10]
    assert type(module.state) is torch.Tensor


def test_prints_on_every_call_once(recording, capsys):
    def call(x):
        print("called")
        return x + 1

    run_quietly(torchbay.compile(call, backend=recording), ONE, times=4)
    assert capsys.readouterr().out == "called\n" * 4


def test_uses_up_an_iterator_as_eager_does(recording):
    numbers = itertools.count()
    compiled = torchbay.compile(lambda x: x * next(numbers), backend=recording)
    assert [value.item() for value in run_quietly(compiled, ONE, times=6)] == [0, 1, 2, 3, 4, 5]


def test_ends_an_iterator_as_eager_does(recording):
    tensors = iter([ONE, ONE * 2, ONE * 3])
    compiled = torchbay.compile(lambda x: sum(tensors, x), backend=recording)
    assert [value.item() for value in run_quietly(compiled, ONE, times=3)] == [7, 1, 1]


def test_never_bakes_the_clock(recording):
    compiled = torchbay.compile(lambda x: x.double() * time.perf_counter_ns(), backend=recording)
    found = [value.item() for value in run_quietly(compiled, ONE, times=4)]
    assert found == sorted(set(found))


def test_never_bakes_the_clock_in_a_literal(recording):
    compiled = torchbay.compile(
        lambda x: x * torch.tensor(time.perf_counter_ns(), dtype=torch.int64), backend=recording
    )
    found = [
        value.item() for value in run_quietly(compiled, torch.ones(1, dtype=torch.int64), times=4)
    ]
    assert found == sorted(set(found))


def test_does_not_take_the_garbage_collector_for_the_program(recording):
    seconds = []

    def measure(phase, details):
        seconds.append(time.perf_counter())

    def call(x):
        gc.collect(0)
        return x + 1

    compiled = torchbay.compile(call, backend=recording, fullgraph=True)
    gc.callbacks.append(measure)
    try:
        for _ in range(3):
            assert torch.equal(compiled(ONE), ONE + 1)
    finally:
        gc.callbacks.remove(measure)
    assert dict(torchbay.explain(compiled).calls) == {"graph": 2, "eager": 1}


def test_serves_a_memo_after_it_was_filled(recording):
    memo = {}

    def call(x):
        if x.shape not in memo:
            memo[x.shape] = torch.arange(x.shape[0]) + 1.0
        return x * memo[x.shape]

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(5):
        assert torch.equal(compiled(torch.ones(3)), torch.tensor([1.0, 2.0, 3.0]))
    assert holds_no_fake(memo.values())
    assert served(compiled)["graph"] >= 3


def test_never_keeps_the_result_of_a_memo_of_results(recording):
    memo = {}

    def call(x):
        key = float(x.sum())
        if key not in memo:
            memo[key] = x * 3
        return memo[key]

    compiled = torchbay.compile(call, backend=recording)
    found = [run_quietly(compiled, ONE * k, times=1)[0].item() for k in (1, 1, 1, 2, 1, 2)]
    assert found == [3, 3, 3, 6, 3, 6]
    assert holds_no_fake(memo.values())


def test_never_leaves_a_fake_in_an_lru_cache(recording):
    @functools.lru_cache
    def mask(size, factor):
        return torch.ones(size) * factor

    compiled = torchbay.compile(lambda x: x * mask(3, int(x.sum())), backend=recording)
    for factor in (1, 2, 1, 2):
        (found,) = run_quietly(compiled, torch.tensor([factor, 0.0, 0.0]), times=1)
        assert found[0].item() == factor**2
        assert type(mask(3, factor)) is torch.Tensor


def test_serves_state_built_on_the_first_call(recording):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None
            self.warned = False

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.ones(3) * 2
            self.warned = True
            return x * self.mask

    module = Lazy()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(4):
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert type(module.mask) is torch.Tensor
    assert served(compiled)["graph"] >= 2


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_keeps_an_attribute_that_follows_the_sizes(recording):
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.size = None
            self.last = ()

        def forward(self, x):
            self.size = x.shape[0]
            self.last = (x.shape[0], "x")
            return x + self.size

    module = Sets()
    compiled = torchbay.compile(module, backend=recording)
    for size in (3, 3, 3, 4, 4, 3, 4):
        assert torch.equal(compiled(torch.ones(size)), torch.full((size,), size + 1.0))
        assert module.size == size
        assert module.last == (size, "x")


NOT_SERVED = {
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "asarray": lambda x: x + float(np.asarray(x)[0]),
    "repr": lambda x: (x + 1, repr(x))[0],
    "format": lambda x: (x + 1, f"{x}")[0],
    "data_ptr": lambda x: x + (x.data_ptr() == 0),
    "storage": lambda x: x + x.untyped_storage().nbytes(),
    "memoryview": lambda x: x + len(memoryview(x.numpy())),
    "dlpack": lambda x: torch.from_dlpack(x) + 1,
    "state_dict of a new module": lambda x: x + len(nn.Linear(1, 1).state_dict()),
    "deepcopy": lambda x: copy.deepcopy(x) + 1,
    "sparse inside": lambda x: x.to_sparse().to_dense() + 1,
    "quantized inside": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127) + 1,
    "save": lambda x: (torch.save(x, io.BytesIO()), x + 1)[1],
    "python pickle": lambda x: pickle.loads(pickle.dumps(x)) + 1,
    "sort with a key": lambda x: sorted([x + 1, x], key=torch.Tensor.item)[1],
    "hash": lambda x: {x: x + 1}[x],
    "id": lambda x: x + (id(x) == 0),
    "storage offset": lambda x: x + x.storage_offset(),
    "version": lambda x: x + x._version * 0,
    "eval": lambda x: eval("x + 1", {"x": x}),
    "contextvar": lambda x: x + CONTEXT.get(),
    "environment": lambda x: x + len(os.environ.get("TORCHBAY_TEST", "")),
}  # fmt: skip
CONTEXT = ContextVar("factor", default=1.0)


@pytest.mark.parametrize("name", NOT_SERVED)
@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_is_right_whatever_the_call_does(name, recording):
    function = NOT_SERVED[name]
    compiled = torchbay.compile(function, backend=recording)
    for value in (1.0, 2.0, 3.0):
        x = torch.full((1,), value)
        assert torch.equal(compiled(x), function(x))


def test_sees_another_value_of_a_context_variable(recording):
    compiled = torchbay.compile(lambda x: x + CONTEXT.get(), backend=recording)
    run_quietly(compiled, ONE, times=2)
    token = CONTEXT.set(5.0)
    try:
        assert run_quietly(compiled, ONE, times=1)[0].item() == 6
    finally:
        CONTEXT.reset(token)


def test_warns_once_pointing_at_the_callers_line(recording):
    compiled = torchbay.compile(NOT_SERVED["numpy"], backend=recording, name="mine")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(ONE)
        compiled(ONE)
        compiled(ONE)
    (warning,) = caught
    assert warning.category is errors.TorchbayWarning
    assert warning.filename == __file__
    first_call = test_warns_once_pointing_at_the_callers_line.__code__.co_firstlineno + 4
    assert warning.lineno == first_call
    assert "mine runs eagerly" in str(warning.message)
    assert "numpy()" in str(warning.message)
    assert __file__ in str(warning.message)
    assert served(compiled) == {"graph": 0, "eager": 3}


@pytest.mark.parametrize("kind", ["module", "method"])
def test_points_at_the_callers_line_whatever_was_compiled(kind, recording):
    class Reads(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.numpy())

    class Layer:
        @torchbay.compile(backend=recording)
        def method(self, x):
            return torch.from_numpy(x.numpy())

    compiled = torchbay.compile(Reads(), backend=recording) if kind == "module" else Layer().method
    with pytest.warns(errors.TorchbayWarning) as caught:
        compiled(ONE)
    assert caught[0].filename == __file__


def test_says_why_for_each_kind_of_call(recording):
    def call(x, flag):
        return torch.from_numpy(x.numpy()) if flag else x + len(repr(x))

    compiled = torchbay.compile(call, backend=recording)
    with pytest.warns(errors.TorchbayWarning, match=r"numpy\(\)"):
        compiled(ONE, flag=True)
    with pytest.warns(errors.TorchbayWarning, match=r"repr\(\)"):
        compiled(ONE, flag=False)
    assert len(torchbay.explain(compiled).eager) == 2


def test_traces_nothing_again_for_a_call_that_runs_eagerly(recording):
    runs = []

    def call(x):
        runs.append(torch.compiler.is_compiling())
        return torch.from_numpy(x.numpy())

    compiled = torchbay.compile(call, backend=recording)
    run_quietly(compiled, ONE, times=6)
    assert len(runs) == 6
    assert not any(runs[3:])


def test_raises_under_fullgraph_after_the_call_happened(recording):
    x = torch.zeros(1)

    def call(x):
        x.add_(1)
        return torch.from_numpy(x.numpy() + 1)

    compiled = torchbay.compile(call, backend=recording, fullgraph=True)
    for count in (1, 2, 3):
        with pytest.raises(errors.NotServed, match=r"numpy\(\)") as caught:
            compiled(x)
        assert x.item() == count
        assert caught.value.result.item() == count + 1
        assert __file__ in caught.value.account
        assert caught.value.remedy
    assert served(compiled) == {"graph": 0, "eager": 3}


def test_serves_beside_calls_that_run_eagerly(recording):
    def call(x, flag):
        return torch.from_numpy(x.numpy() + 1) if flag else x + 1

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(3):
        for flag in (True, False):
            assert run_quietly(compiled, ONE, flag, times=1)[0].item() == 2
    assert served(compiled) == {"graph": 2, "eager": 4}
    assert len(torchbay.explain(compiled).specializations) == 1


class TestGradients:
    """A call whose result needs gradients runs eagerly; training comes later."""

    @pytest.fixture(autouse=True)
    def gradients(self, inference):
        with torch.enable_grad():
            yield

    def test_are_those_of_eager_with_one_warning(self, recording):
        module, expected = nn.Linear(2, 2), nn.Linear(2, 2)
        expected.load_state_dict(module.state_dict())
        compiled = torchbay.compile(module, backend=recording)
        with pytest.warns(errors.TorchbayWarning, match="gradients") as caught:
            for _ in range(3):
                compiled(torch.ones(2)).sum().backward()
                expected(torch.ones(2)).sum().backward()
        assert len(caught) == 1
        assert torch.equal(module.weight.grad, expected.weight.grad)
        assert served(compiled) == {"graph": 0, "eager": 3}

    def test_flow_to_inputs(self, recording):
        compiled = torchbay.compile(lambda x: x**3, backend=recording)
        x = torch.ones(2, requires_grad=True)
        (found,) = run_quietly(compiled, x, times=1)
        found.sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 3.0))

    @pytest.mark.parametrize("first", ["with", "without"])
    def test_mix_with_inference(self, first, recording):
        module = nn.Linear(2, 2)
        compiled = torchbay.compile(module, backend=recording)
        for way in (["with", "without"] if first == "with" else ["without", "with"]) * 3:
            if way == "with":
                assert run_quietly(compiled, torch.ones(2), times=1)[0].requires_grad
            else:
                with torch.no_grad():
                    assert not run_quietly(compiled, torch.ones(2), times=1)[0].requires_grad
        assert served(compiled) == {"graph": 2, "eager": 4}

    def test_are_not_needed_for_frozen_weights(self, recording):
        module = nn.Linear(2, 2).requires_grad_(False)
        compiled = torchbay.compile(module, backend=recording)
        compiled(torch.ones(2))
        assert torch.equal(compiled(torch.ones(2)), module(torch.ones(2)))
        assert served(compiled) == {"graph": 1, "eager": 1}
        module.requires_grad_(True)
        assert run_quietly(compiled, torch.ones(2), times=1)[0].requires_grad

    def test_are_not_needed_for_a_detached_result(self, recording):
        module = nn.Linear(2, 2)
        compiled = torchbay.compile(lambda x: module(x).detach().argmax(), backend=recording)
        assert compiled(torch.ones(2)) == compiled(torch.ones(2))
        assert served(compiled) == {"graph": 1, "eager": 1}

    def test_under_a_decorator_are_off(self, recording):
        module = nn.Linear(2, 2)

        @torchbay.compile(backend=recording)
        @torch.no_grad()
        def call(x):
            return module(x)

        assert not call(torch.ones(2)).requires_grad
        assert not call(torch.ones(2)).requires_grad
        assert served(call) == {"graph": 1, "eager": 1}

    def test_of_a_step_inside_the_call(self, recording):
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = module(x).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = torchbay.compile(step, backend=recording)
        losses = [value.item() for value in run_quietly(compiled, torch.ones(2), times=4)]
        assert losses == sorted(set(losses), reverse=True)

    def test_asked_for_inside_the_call(self, recording):
        def call(x, w):
            loss = (x * w * w).sum()
            return torch.autograd.grad(loss, w)[0]

        compiled = torchbay.compile(call, backend=recording)
        w = torch.full((2,), 3.0, requires_grad=True)
        for value in (1.0, 2.0, 5.0):
            (found,) = run_quietly(compiled, torch.full((2,), value), w, times=1)
            assert torch.equal(found, torch.full((2,), 6.0 * value))


def test_serves_what_logs_on_its_first_call_only(recording, caplog):

    state = {"has_warned": False}

    def call(x):
        if not state["has_warned"]:
            state["has_warned"] = True
            logging.getLogger("test").warning("once")
        return x + 1

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(4):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert [record.message for record in caplog.records] == ["once"]
    assert torchbay.explain(compiled).calls == {"graph": 2, "eager": 2}


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_logs_on_every_call_what_eager_would(recording, caplog):

    def call(x):
        logging.getLogger("test").warning("again")
        return x + 1

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(4):
        compiled(torch.ones(2))
    assert [record.message for record in caplog.records] == ["again"] * 4
