"""State that a call leaves in Python's containers is left there by its graph too."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import textwrap
import threading
import warnings
import weakref
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

import torchbay
from torchbay import errors
from torchbay.plugin import Capabilities


def served(compiled):
    return dict(torchbay.explain(compiled).calls)


def specializations(compiled):
    return len(torchbay.explain(compiled).specializations)


def run_of(compiled):
    return torchbay.explain(compiled).specializations[0].run


def same(left, right):
    """Whether two states are equal: in class, structure, tensors and plain values."""
    if isinstance(left, torch.Tensor):
        return type(left) is type(right) and torch.equal(left, right)
    if isinstance(left, dict):
        return [*left] == [*right] and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        is_alike = type(left) is type(right) and len(left) == len(right)
        return is_alike and all(map(same, left, right))
    if hasattr(left, "__dict__"):
        return type(left) is type(right) and same(vars(left), vars(right))
    return left == right


def numbered(count, size=2):
    return [torch.full((size,), float(i + 1)) for i in range(count)]


class Cell(nn.Module):
    """Remembers its hidden state from call to call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.RNNCell(2, 2)
        self.hidden = None

    def forward(self, x):
        hidden = x.new_zeros(x.shape) if self.hidden is None else self.hidden
        self.hidden = self.cell(x, hidden)
        return self.hidden

    def reset(self):
        self.hidden = None


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.LSTMCell(2, 2)
        self.state = None

    def forward(self, x):
        self.state = self.cell(x, self.state)
        return self.state[0] * 2


def check(module, inputs, recording, *, most, graph, call=lambda module, x: module(x)):
    """Compare every call and the state after it with eager; return the compiled module."""
    eager = copy.deepcopy(module)
    compiled = torchbay.compile(module, backend=recording)
    for x in inputs:
        assert same(call(compiled, x), call(eager, x))
        assert same(state_of(module), state_of(eager))
    assert served(compiled)["graph"] >= graph
    assert specializations(compiled) <= most
    return compiled


def state_of(module):
    return {k: v for k, v in vars(module).items() if not k.startswith("_")} | dict(module._buffers)


def test_keeps_hidden_state(recording):
    compiled = check(Cell(), [torch.ones(1, 2) * i for i in range(8)], recording, most=3, graph=6)
    assert "['hidden'] = out[0]" in run_of(compiled)


def test_returns_the_very_tensor_that_it_stores(recording):
    module = Cell()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(5):
        assert compiled(torch.ones(1, 2)) is module.hidden
    assert served(compiled)["graph"] == 3


def test_starts_anew_after_the_state_was_dropped(recording):
    module, eager = Cell(), Cell()
    compiled = torchbay.compile(module, backend=recording)
    for count in range(12):
        if count % 4 == 0:
            module.reset()
            eager.reset()
        x = torch.full((1, 2), float(count))
        assert torch.equal(compiled(x), eager(x))
    assert specializations(compiled) <= 2
    assert served(compiled)["graph"] >= 9


def test_keeps_hidden_state_of_another_batch(recording):
    module, eager = Cell(), Cell()
    compiled = torchbay.compile(module, backend=recording)
    for size in (1, 1, 1, 3, 3, 3, 1, 1):
        if module.hidden is None or len(module.hidden) != size:
            module.reset()
            eager.reset()
        x = torch.ones(size, 2)
        assert torch.equal(compiled(x), eager(x))
    assert specializations(compiled) <= 4


def test_keeps_hidden_state_in_a_tuple(recording):
    check(Lstm(), [torch.ones(1, 2) * i for i in range(8)], recording, most=2, graph=6)


def test_reads_and_writes_what_it_feeds_back(recording):
    module, eager = Cell(), Cell()
    compiled = torchbay.compile(module, backend=recording)
    x = y = torch.ones(1, 2)
    for _ in range(8):
        x, y = compiled(x), eager(y)
        assert torch.equal(x, y)
    assert served(compiled)["graph"] >= 5


@dataclasses.dataclass
class State:
    h: torch.Tensor
    step: str = "first"


class KeepsRecord(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = State(torch.zeros(2))

    def forward(self, x):
        self.state = State(self.state.h + x, "later")
        return self.state.h * 2


class KeepsDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = {"h": torch.zeros(2), "parts": [torch.zeros(2)]}

    def forward(self, x):
        h = self.state["h"] + x
        self.state = {"h": h, "parts": [h * 2, h]}
        return h


class WritesRecord(nn.Module):
    def __init__(self):
        super().__init__()
        self.state = State(torch.zeros(2))

    def forward(self, x):
        self.state.h = self.state.h * 0.5 + x
        return x * 2


class ReplacesBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        self.mean = self.mean * 0.5 + x
        return self.mean


class Toggles(nn.Module):
    def __init__(self):
        super().__init__()
        self.flip = False

    def forward(self, x):
        self.flip = not self.flip
        return x * 2 if self.flip else x * 3


class SwapsNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.now, self.before = torch.ones(2), torch.zeros(2)

    def forward(self, x):
        self.now, self.before = self.before + x, self.now
        return self.now - self.before


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class KeepsNamedTuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair(torch.zeros(2), torch.zeros(2))

    def forward(self, x):
        self.pair = Pair(self.pair.h + x, self.pair.c * x)
        return self.pair.h * 2


class ReplacesSet(nn.Module):
    def __init__(self):
        super().__init__()
        self.flags = self.same = {"odd"}

    def forward(self, x):
        self.flags = self.same = self.flags ^ {"odd"}
        return x * len(self.flags)


class KeepsOldList(nn.Module):
    def __init__(self):
        super().__init__()
        self.old, self.new = [], [torch.ones(2)]

    def forward(self, x):
        self.old = self.new
        self.new = [x + self.old[0]]
        return self.new[0]


class RollsRing(nn.Module):
    def __init__(self):
        super().__init__()
        self.ring = [torch.zeros(2) for _ in range(3)]

    def forward(self, x):
        self.ring.pop(0)
        self.ring.append(x + 1)
        return sum(self.ring)


class ReplacesElement(nn.Module):
    def __init__(self):
        super().__init__()
        self.states = [torch.zeros(2), torch.zeros(2)]

    def forward(self, x):
        self.states[1] = self.states[1] + x
        return self.states[1] * 2


class SharesWithItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = self.right = None

    def forward(self, x):
        self.left = self.right = [x + 1]
        return self.left


class KeepsView(nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = self.part = torch.zeros(4)

    def forward(self, x):
        self.whole = torch.cat([x, x * 2])
        self.part = self.whole[1:3]
        return self.part + 1


class DeletesAndSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.zeros(2), torch.zeros(2)

    def forward(self, x):
        del self.first
        self.first = x + self.second
        return x


class MovesToEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.recent = collections.OrderedDict(a=torch.zeros(2), b=torch.ones(2))

    def forward(self, x):
        oldest = next(iter(self.recent))
        self.recent.move_to_end(oldest)
        self.recent[oldest] = self.recent[oldest] + x
        return x


class FillsDefaultDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.groups = collections.defaultdict(list)

    def forward(self, x):
        self.groups = collections.defaultdict(list, self.groups)
        self.groups["a"] = [x + 1]
        return x * 2


class MutatesToo(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.last = torch.zeros(2)

    def forward(self, x):
        self.count += 1
        self.last = self.count + x
        return self.last * self.count


class NamesAStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage, self.seen = "warm", {"warm"}

    def forward(self, x):
        self.stage = "cold" if self.stage == "warm" else "warm"
        if self.stage in self.seen:
            self.seen.discard(self.stage)
        else:
            self.seen.add(self.stage)
        return x + len(self.seen)


# Of each class the most specializations that eight calls may need.
KEEPERS = {
    KeepsRecord: 2,
    KeepsDict: 2,
    WritesRecord: 1,
    ReplacesBuffer: 1,
    Toggles: 2,
    SwapsNames: 1,
    KeepsNamedTuple: 1,
    ReplacesSet: 2,
    KeepsOldList: 2,
    RollsRing: 3,
    ReplacesElement: 1,
    SharesWithItself: 1,
    KeepsView: 2,
    DeletesAndSets: 2,
    MovesToEnd: 2,
    FillsDefaultDict: 1,
    MutatesToo: 1,
    NamesAStage: 4,
}


@pytest.mark.parametrize("kind", KEEPERS)
@pytest.mark.parametrize("way", ["recording", "writing"])
def test_leaves_what_eager_leaves(kind, way, request):
    backend = request.getfixturevalue(way)
    check(kind(), numbered(10), backend, most=KEEPERS[kind], graph=5)


def test_keeps_one_list_in_two_places(recording):
    module = SharesWithItself()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(4):
        result = compiled(torch.ones(2))
        assert module.left is module.right is result
    assert served(compiled)["graph"] >= 1


def test_keeps_one_set_in_two_places(recording):
    module = ReplacesSet()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(5):
        compiled(torch.ones(2))
        assert module.flags is module.same
    module.same = set(module.flags)
    compiled(torch.ones(2))
    assert module.flags is module.same
    assert served(compiled)["graph"] >= 2


def test_keeps_a_view_in_the_memory_it_is_of(recording):
    module = KeepsView()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(4):
        compiled(torch.ones(2))
        module.whole.fill_(7)
        assert (module.part == 7).all()
    assert served(compiled)["graph"] >= 1


def test_stores_the_input_itself(recording):
    class Remembers(nn.Module):
        def forward(self, x):
            self.last = x
            return x + 1

    module = Remembers()
    compiled = torchbay.compile(module, backend=recording)
    for x in numbered(6):
        compiled(x)
        assert module.last is x
    assert served(compiled)["graph"] == 4


def test_stores_a_view_of_a_changed_input(recording):
    class Remembers(nn.Module):
        def forward(self, x):
            self.part = x[1:]
            x.mul_(2)
            return x + 1

    module = Remembers()
    compiled = torchbay.compile(module, backend=recording)
    for x in numbered(5):
        expected = x * 2
        compiled(x)
        assert torch.equal(module.part, expected[1:])
        x.fill_(9)
        assert (module.part == 9).all()
    assert served(compiled)["graph"] == 3


def test_grows_a_cache_in_a_dict(recording):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x):
            old = self.cache.get("k")
            self.cache["k"] = x if old is None else torch.cat([old, x])
            return self.cache["k"].sum(0)

    compiled = check(
        Attends(), [torch.ones(1, 2) * i for i in range(6)], recording, most=6, graph=0
    )
    module = compiled.original
    compiled.original.cache.clear()
    assert torch.equal(compiled(torch.ones(1, 2)), torch.ones(2))
    before = served(compiled)
    for _ in range(3):
        module.cache.clear()
        compiled(torch.ones(1, 2))
        compiled(torch.ones(1, 2))
        assert torch.equal(module.cache["k"], torch.ones(2, 2))
    assert served(compiled)["graph"] >= before["graph"] + 4


def grows(x, cache):
    cache.append(x * 2)
    return sum(cache)


def test_grows_a_list_that_is_passed(recording):
    compiled = torchbay.compile(grows, backend=recording)
    for _ in range(4):
        mine, theirs = [], []
        for x in numbered(3):
            assert torch.equal(compiled(x, mine), grows(x, theirs))
            assert same(mine, theirs)
    assert served(compiled)["graph"] >= 6
    assert "cache.extend([out[0]])" in torchbay.explain(compiled).specializations[0].run


def test_writes_every_list_that_is_passed(recording):
    compiled = torchbay.compile(grows, backend=recording)
    lists = [[] for _ in range(5)]
    for x, cache in zip(numbered(5), lists, strict=True):
        compiled(x, cache)
    assert [cache[0][0].item() for cache in lists] == [2, 4, 6, 8, 10]
    assert served(compiled)["graph"] == 3


def test_writes_a_list_that_is_passed_twice(recording):
    def both(x, first, second):
        first.append(x)
        second.append(x * 2)
        return len(first)

    compiled = torchbay.compile(both, backend=recording)
    for _ in range(4):
        assert compiled(torch.ones(1), [], []) == 1
    one = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.TorchbayWarning)
        assert [compiled(torch.ones(1), one, one) for _ in range(3)] == [2, 4, 6]
    assert [value.item() for value in one] == [1, 2] * 3


def test_writes_a_list_that_is_also_known_otherwise(recording):
    known = []

    def call(x, cache):
        cache.append(x)
        return len(known)

    compiled = torchbay.compile(call, backend=recording)
    for _ in range(4):
        assert compiled(torch.ones(1), []) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.TorchbayWarning)
        assert [compiled(torch.ones(1), known) for _ in range(3)] == [1, 2, 3]


@dataclasses.dataclass
class Memory:
    value: torch.Tensor
    log: list = dataclasses.field(default_factory=list)
    flags: set = dataclasses.field(default_factory=set)


def remembers(x, memory):
    memory.value = memory.value + x
    memory.log = [*memory.log[-1:], x]
    memory.flags.add("used")
    return memory


def test_sets_a_field_of_an_argument(recording):
    compiled = torchbay.compile(remembers, backend=recording)
    for _ in range(3):
        mine, theirs = Memory(torch.zeros(2)), Memory(torch.zeros(2))
        for x in numbered(4):
            assert compiled(x, mine) is mine
            remembers(x, theirs)
            assert same(mine, theirs)
    assert served(compiled)["graph"] >= 6


class StoresWhatIsPassed(nn.Module):
    def forward(self, x, cache):
        self.cache = cache
        return x + 1


def test_stores_the_list_that_is_passed(recording):
    module = StoresWhatIsPassed()
    compiled = torchbay.compile(module, backend=recording)
    for cache in [one := [], one, one, [], [], []]:
        compiled(torch.ones(1), cache)
        assert module.cache is cache
    assert served(compiled)["graph"] >= 2


def test_returns_the_second_list_when_it_is_no_longer_the_first(recording):
    compiled = torchbay.compile(lambda x, first, second: (x + 1, second), backend=recording)
    one, other = [1], [1]
    for _ in range(2):
        assert compiled(torch.ones(1), one, one)[1] is one
    assert compiled(torch.ones(1), one, other)[1] is other
    assert compiled(torch.ones(1), one, other)[1] is other
    assert served(compiled)["graph"] == 2


class Holder:
    """An object that is neither a module nor a dataclass."""

    def __init__(self):
        self.h = torch.zeros(2)
        self.trace = [torch.zeros(2)]


def test_sets_an_attribute_of_an_object_that_is_passed(recording):
    def call(x, holder):
        holder.h = holder.h + x
        holder.trace[0] = holder.h
        return holder.h * 2

    compiled = torchbay.compile(call, backend=recording)
    mine, theirs = Holder(), Holder()
    for x in numbered(6):
        assert torch.equal(compiled(x, mine), call(x, theirs))
        assert same(mine, theirs)
    assert served(compiled)["graph"] == 4


def test_keeps_a_tensor_in_a_closure(recording):
    def make():
        total = torch.zeros(2)

        def add(x):
            nonlocal total
            total = total + x
            return total * 2

        return add, lambda: total

    add, total = make()
    eager, expected = make()
    compiled = torchbay.compile(add, backend=recording)
    for x in numbered(6):
        assert torch.equal(compiled(x), eager(x))
        assert torch.equal(total(), expected())
    assert served(compiled)["graph"] == 4


RUNNING = torch.zeros(2)


def accumulates(x):
    global RUNNING
    RUNNING = RUNNING + x
    return RUNNING * 2


def test_keeps_a_tensor_in_a_global(recording):
    global RUNNING
    RUNNING = torch.zeros(2)
    compiled = torchbay.compile(accumulates, backend=recording)
    total = torch.zeros(2)
    for x in numbered(6):
        total = total + x
        assert torch.equal(compiled(x), total * 2)
        assert torch.equal(RUNNING, total)
    assert served(compiled)["graph"] == 4


class OnItsClass(nn.Module):
    shared = torch.zeros(2)

    def forward(self, x):
        type(self).shared = type(self).shared + x
        return self.shared * 2


def test_keeps_a_tensor_on_a_class(recording):
    OnItsClass.shared = torch.zeros(2)
    compiled = torchbay.compile(OnItsClass(), backend=recording)
    total = torch.zeros(2)
    for x in numbered(6):
        total = total + x
        assert torch.equal(compiled(x), total * 2)
        assert torch.equal(OnItsClass.shared, total)
    assert served(compiled)["graph"] == 4


def test_adds_an_attribute_to_a_class_on_every_call(recording):
    class Late(nn.Module):
        def forward(self, x):
            type(self).late = x + 1
            return x * 2

    compiled = torchbay.compile(Late(), backend=recording)
    for x in numbered(5):
        compiled(x)
        assert torch.equal(Late.late, x + 1)
    assert served(compiled)["graph"] >= 2


def test_adds_an_attribute_to_a_function_on_every_call(recording):
    def call(x):
        call.last = x + 1
        return x * 2

    compiled = torchbay.compile(call, backend=recording)
    for x in numbered(5):
        compiled(x)
        assert torch.equal(call.last, x + 1)
    assert served(compiled)["graph"] == 3


def test_adds_a_global_to_another_module_on_every_call(recording):
    other = ModuleType("other")

    def call(x):
        other.last = x + 1
        return x * 2

    compiled = torchbay.compile(call, backend=recording)
    for x in numbered(5):
        compiled(x)
        assert torch.equal(other.last, x + 1)
    assert served(compiled)["graph"] == 3


class Accumulator:
    def __init__(self):
        self.total = torch.zeros(2)

    def add(self, x):
        self.total = self.total + x
        return self.total * 2


def test_keeps_state_of_a_method(recording):
    class Compiled(Accumulator):
        add = torchbay.compile(Accumulator.add, backend=recording)

    things = [Compiled(), Compiled()]
    eager = [Accumulator(), Accumulator()]
    for x in numbered(5):
        for mine, theirs in zip(things, eager, strict=True):
            assert torch.equal(mine.add(x), theirs.add(x))
            assert torch.equal(mine.total, theirs.total)
    assert served(things[0].add)["graph"] == 3


def test_keeps_state_of_a_bound_method(recording):
    mine, theirs = Accumulator(), Accumulator()
    compiled = torchbay.compile(mine.add, backend=recording)
    for x in numbered(5):
        assert torch.equal(compiled(x), theirs.add(x))
        assert torch.equal(mine.total, theirs.total)
    assert served(compiled)["graph"] == 3


def test_keeps_state_of_a_module_that_is_passed(recording):
    compiled = torchbay.compile(lambda module, x: module(x), backend=recording)
    mine, theirs = Lstm(), Lstm()
    for _ in range(5):
        assert torch.equal(compiled(mine, torch.ones(1, 2)), theirs(torch.ones(1, 2)))
        assert same(mine.state, theirs.state)
    assert served(compiled)["graph"] == 3


def test_writes_a_set_that_is_passed(recording):
    def call(x, names):
        names.add("b")
        names.discard("a")
        return x * 2

    compiled = torchbay.compile(call, backend=recording)
    for x in numbered(5):
        names = {"a"}
        compiled(x, names)
        assert names == {"b"}
    assert served(compiled)["graph"] == 3


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_changes_a_mapping_of_a_class_that_it_cannot_write(recording):
    class Output(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            self.order = [*getattr(self, "order", []), key]

    holder = Holder()

    def call(x, holder):
        holder.out["y"] = x + 1
        return x

    compiled = torchbay.compile(call, backend=recording)
    for x in numbered(5):
        holder.out = Output()
        compiled(x, holder)
        assert holder.out.order == ["y"]
        assert torch.equal(holder.out["y"], x + 1)


def test_deletes_what_eager_deletes(recording):
    def call(x, table):
        x = x + table.pop("bias")
        table["last"] = x
        return x

    compiled = torchbay.compile(call, backend=recording)
    for x in numbered(6):
        mine = {"bias": x * 2, "scale": x}
        result = compiled(x, mine)
        assert list(mine) == ["scale", "last"]
        assert mine["last"] is result
        assert torch.equal(result, x * 3)
    assert served(compiled)["graph"] == 4


def test_clears_a_list(recording):
    def call(x, pending):
        total = sum(pending, x)
        pending.clear()
        return total

    compiled = torchbay.compile(call, backend=recording)
    for x in numbered(6):
        pending = [x, x]
        assert torch.equal(compiled(x, pending), x * 3)
        assert pending == []
    assert served(compiled)["graph"] == 4


def test_writes_what_each_branch_writes(recording):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = self.down = torch.zeros(2)

        def forward(self, x):
            if x.sum() > 0:
                self.up = self.up + x
                return self.up
            self.down = self.down + x
            return self.down * 2

    inputs = [x * sign for x in numbered(6) for sign in (1, -1, -1)]
    check(Branches(), inputs, recording, most=6, graph=12)


def test_writes_only_what_is_guarded(recording):
    module = Toggles()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(6):
        compiled(torch.ones(2))
    module.flip = "set by somebody else"
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert module.flip is False


def test_writes_a_guarded_flag_only_while_it_differs(recording):
    class Marks(nn.Module):
        def __init__(self):
            super().__init__()
            self.is_used = False

        def forward(self, x):
            self.is_used = True
            return x + 1

    module = Marks()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(4):
        compiled(torch.ones(2))
        module.is_used = False
        compiled(torch.ones(2))
        assert module.is_used is True
    assert specializations(compiled) <= 2


def test_undoes_everything_after_a_warmup(recording):
    module, cache = Cell(), []
    compiled = torchbay.compile(lambda x, cache: (cache.append(x), module(x))[1], backend=recording)
    for _ in range(3):
        compiled.warmup(torch.ones(1, 2), cache)
        assert module.hidden is None
        assert cache == []
    eager = Cell()
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(1, 2), []), eager(torch.ones(1, 2)))
    assert served(compiled)["graph"] >= 1


def test_writes_nothing_when_the_graph_fails(recording):
    module = Cell()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(3):
        compiled(torch.ones(1, 2))
    hidden = module.hidden

    def fails(_):
        raise MemoryError

    entry = torchbay._compiled.dispatcher_of(compiled).entries[0]
    entry.run.__globals__["execute"] = fails
    with pytest.raises(MemoryError):
        compiled(torch.ones(1, 2))
    assert module.hidden is hidden


def test_keeps_no_old_state_alive(recording):
    for kind in (Cell, Lstm):
        module = kind()
        compiled = torchbay.compile(module, backend=recording)
        states = []
        for _ in range(6):
            compiled(torch.ones(1, 2))
            state = module.hidden if kind is Cell else module.state[0]
            states.append(weakref.ref(state))
            del state
        gc.collect()
        recording.requests.clear()
        gc.collect()
        assert [reference() is not None for reference in states] == [False] * 5 + [True]


def test_keeps_no_argument_alive(recording):
    def call(x, holder, memory):
        holder.h = holder.h + x
        memory.value = holder.h
        return x

    compiled = torchbay.compile(call, backend=recording)
    holder, memory = Holder(), Memory(torch.zeros(2))
    for x in numbered(5):
        compiled(x, holder, memory)
    references = [weakref.ref(thing) for thing in (holder, memory, holder.h, memory.value)]
    assert served(compiled)["graph"] >= 3
    del holder, memory
    recording.requests.clear()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_returns_the_list_that_an_argument_holds_now(recording):
    compiled = torchbay.compile(lambda holder, x: (holder.trace, x + 1), backend=recording)
    holder = Holder()
    for _ in range(3):
        assert compiled(holder, torch.ones(2))[0] is holder.trace
    holder.trace = [torch.zeros(2)]
    assert compiled(holder, torch.ones(2))[0] is holder.trace
    assert served(compiled)["graph"] == 3


def test_sees_that_a_tuple_of_an_argument_grew(recording):
    compiled = torchbay.compile(lambda holder, x: x * sum(holder.trace), backend=recording)
    holder = Holder()
    holder.trace = (torch.ones(1), torch.ones(1))
    assert [compiled(holder, torch.ones(1)).item() for _ in range(2)] == [2, 2]
    holder.trace = (*holder.trace, torch.ones(1))
    assert compiled(holder, torch.ones(1)).item() == 3


KNOWN = ["a", "b"]


def test_sees_that_an_argument_lets_go_of_a_known_list(recording):
    compiled = torchbay.compile(
        lambda holder, x: x * (len(holder.trace) + len(KNOWN)), backend=recording
    )
    holder = Holder()
    holder.trace = KNOWN
    assert [compiled(holder, torch.ones(1)).item() for _ in range(3)] == [4, 4, 4]
    holder.trace = ["a"]
    assert compiled(holder, torch.ones(1)).item() == 3


def counter():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x):
            self.n += 1
            return x + 1

    return Counts()


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_counts_on_every_call(recording):
    module = counter()
    compiled = torchbay.compile(module, backend=recording)
    for count in range(12):
        compiled(torch.ones(2))
        assert module.n == count + 1
    assert len(recording.requests) <= 2


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_counts_beside_a_tensor(recording):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = (torch.zeros(2), 0)

        def forward(self, x):
            self.state = (self.state[0] + x, self.state[1] + 1)
            return self.state[0]

    module = Counts()
    compiled = torchbay.compile(module, backend=recording)
    for count in range(12):
        compiled(torch.ones(2))
        assert module.state[1] == count + 1
        assert module.state[0][0].item() == count + 1


def test_counts_from_one_graph(recording):
    module = counter()
    compiled = torchbay.compile(module, backend=recording)
    for count in range(12):
        compiled(torch.ones(2))
        assert type(module.n) is int
        assert module.n == count + 1
    assert torchbay.explain(compiled).calls == {"graph": 10, "eager": 2}


def test_computes_with_a_running_mean(recording):
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = 0.25

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.sum().item()
            return x * self.mean

    module, eager = Averages(), Averages()
    compiled = torchbay.compile(module, backend=recording)
    for count in range(8):
        x = torch.full((3,), count / 7)
        assert torch.equal(compiled(x), eager(x))
        assert module.mean == eager.mean
    assert torchbay.explain(compiled).calls == {"graph": 6, "eager": 2}


def test_counts_eagerly_where_the_backend_takes_no_symbols(recording):
    module, recording.capabilities = counter(), Capabilities()
    compiled = torchbay.compile(module, backend=recording)
    with pytest.warns(errors.TorchbayWarning, match=r"every call changes Python state: self\.n"):
        for _ in range(5):
            compiled(torch.ones(2))
    assert module.n == 5


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_prints_beside_hidden_state(recording, capsys):
    class Prints(Cell):
        def forward(self, x):
            print("called")
            return super().forward(x)

    module, eager = Prints(), Cell()
    compiled = torchbay.compile(module, backend=recording)
    for _ in range(5):
        assert torch.equal(compiled(torch.ones(1, 2)), eager(torch.ones(1, 2)))
    assert capsys.readouterr().out == "called\n" * 5


def test_gives_up_where_two_runs_write_differently(recording):
    class Differs(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = self.right = torch.zeros(2)

        def forward(self, x):
            name = "right" if type(x) is torch.Tensor else "left"
            setattr(self, name, x + 1)
            return x

    module = Differs()
    compiled = torchbay.compile(module, backend=recording)
    compiled(torch.ones(2))
    with pytest.warns(errors.TorchbayWarning, match="changed in one run of the call and not in"):
        compiled(torch.ones(2))
    compiled(torch.ones(2) * 4)
    assert torch.equal(module.right, torch.full((2,), 5.0))


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
def test_keeps_state_that_needs_gradients(recording):
    module, eager = Cell(), Cell()
    compiled = torchbay.compile(module, backend=recording)
    with torch.enable_grad():
        for _ in range(4):
            assert torch.equal(compiled(torch.ones(1, 2)), eager(torch.ones(1, 2)))
            assert module.hidden.requires_grad
    assert not recording.requests


def test_keeps_state_of_a_module_for_each_thread(recording):
    def work(module, eager):
        compiled = torchbay.compile(module, backend=recording)
        x = torch.ones(1, 2)
        found.extend(torch.equal(compiled(x), eager(x)) for _ in range(5))

    found = []
    cells = [(Cell(), Cell()) for _ in range(4)]
    threads = [threading.Thread(target=torch.no_grad()(work), args=pair) for pair in cells]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


OWN_NAMES = ["inference_execution", "leaf", "left", "math", "mismatches", "outcome", "torch"]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_writes_to_variables_named_as_its_own_are(recording, name):
    source = f"""
        def program({name}):
            def call(x):
                {name}.last = x * {name}.factor
                if x.sum() > 0:
                    return x + x.shape[0]
                return x - 1
            return call
    """
    namespace = {}
    exec(compile(textwrap.dedent(source), __file__, "exec"), namespace)
    state = SimpleNamespace(factor=2, last=None)
    compiled = torchbay.compile(namespace["program"](state), backend=recording)
    for size in (2, 3, 4, 5, 5):
        assert compiled(torch.ones(size)).tolist() == [1 + size] * size
        assert state.last.tolist() == [2] * size
    assert served(compiled)["graph"] > 0
