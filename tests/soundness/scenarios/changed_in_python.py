"""Changed in Python: what a call writes is written on every call, whoever serves it."""

from __future__ import annotations

import collections
import contextvars
import io
import logging
import os
import pathlib
import sys
import tempfile
import threading
import types

import torch
from torch import nn

from scenarios._scenario import Program, calls, change, growing, normal, scenario

X = normal(3)
rebind = globals().update


class Stateful(nn.Module):
    """A module that starts with the attributes it is given."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self._forward = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self._forward(self, *args)


# Numbers


@scenario(calls(X, times=10), at_most=2)
def counts_its_calls_on_a_module():
    def forward(self, x):
        self.calls += 1
        return x + 1

    return Stateful(forward, calls=0)


@scenario(calls(X, times=10), at_most=2)
def counts_its_calls_and_uses_the_count():
    def forward(self, x):
        self.calls += 1
        return x * self.calls

    return Stateful(forward, calls=0)


@scenario(calls(X, times=10), at_most=2)
def counts_its_calls_in_a_global():
    def program(x):
        global COUNT
        COUNT += 1
        return x + 1

    rebind(COUNT=0)
    return program


@scenario(calls(X, times=10), at_most=2)
def counts_its_calls_in_a_closure():
    count = 0

    def program(x):
        nonlocal count
        count += 1
        return x + 1

    return program


@scenario(calls(X, times=10), at_most=2)
def counts_its_calls_in_a_dict():
    def forward(self, x):
        self.statistics["calls"] += 1
        self.statistics["rows"] += x.shape[0]
        return x + 1

    return Stateful(forward, statistics={"calls": 0, "rows": 0})


@scenario(calls(X, times=10), at_most=2)
def counts_its_calls_on_its_class():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return x + 1

    net = Counting()
    return Program(net, [net, Counting])


@scenario(calls(X, times=10), at_most=3)
def toggles_a_flag_on_every_call():
    def forward(self, x):
        self.is_odd = not self.is_odd
        return x * 2 if self.is_odd else x * 3

    return Stateful(forward, is_odd=False)


@scenario(calls(X, times=10))
def keeps_a_running_mean_as_a_number():
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return x - self.mean

    return Stateful(forward, mean=0.0)


@scenario(calls(X, times=10), at_most=2)
def advances_a_position_that_it_slices_by():
    def forward(self, x):
        start = self.position
        self.position = start + 1
        return x + self.table[start : start + 3]

    return Stateful(forward, position=0, table=torch.arange(20.0))


# Tensors of the graph


@scenario(calls(X), at_most=1)
def keeps_its_last_activation():
    def forward(self, x):
        self.last = x * 2
        return self.last + 1

    return Stateful(forward, last=None)


@scenario(calls(X, times=8), at_most=2)
def carries_a_hidden_state_from_call_to_call():
    def forward(self, x):
        self.hidden = torch.tanh(self.cell(x) + self.hidden)
        return self.hidden * 2

    return Stateful(forward, cell=nn.Linear(3, 3), hidden=torch.zeros(3))


@scenario(calls(X, times=8), change(lambda net: setattr(net, "hidden", None)), calls(X, times=8))
def starts_its_hidden_state_over_when_it_is_reset():
    def forward(self, x):
        before = torch.zeros_like(x) if self.hidden is None else self.hidden
        self.hidden = torch.tanh(x + before)
        return self.hidden

    return Stateful(forward, hidden=None)


@scenario(calls(X, times=8), eagerly=True)
def collects_every_activation_in_a_list():
    def forward(self, x):
        self.log.append(x * 2)
        return x + 1

    return Stateful(forward, log=[])


@scenario(calls(X), at_most=2)
def writes_its_activations_into_a_dict():
    def forward(self, x):
        self.activations["first"] = first = torch.relu(x)
        self.activations["second"] = first * 2
        return first + 1

    return Stateful(forward, activations={})


@scenario(calls(normal(2, 1, 4), times=8), at_most=3)
def grows_a_cache_of_keys():
    def forward(self, x):
        self.keys = x if self.keys is None else torch.cat([self.keys, x], dim=1)
        return torch.softmax(x @ self.keys.mT, -1) @ self.keys

    return Stateful(forward, keys=None)


@scenario(calls(X), at_most=2)
def swaps_two_tensors_on_every_call():
    def forward(self, x):
        self.front, self.back = self.back, self.front
        return x + self.front

    return Stateful(forward, front=torch.zeros(3), back=torch.ones(3))


@scenario(calls(X), at_most=2)
def keeps_the_input_itself():
    def forward(self, x):
        self.last = x
        return x * 2

    return Stateful(forward, last=None)


@scenario(calls(X), at_most=2)
def keeps_a_view_of_the_input():
    def forward(self, x):
        self.tail = x[1:]
        return x * 2

    return Stateful(forward, tail=None)


@scenario(calls(X), at_most=2)
def returns_what_it_keeps_as_one_tensor():
    def forward(self, x):
        self.last = x * 2
        return self.last, self.last

    return Stateful(forward, last=None)


@scenario(calls(X, times=8), at_most=2)
def moves_an_average_in_a_closure():
    average = torch.zeros(3)

    def program(x):
        nonlocal average
        average = 0.9 * average + 0.1 * x
        return x - average

    return program


@scenario(calls(together=lambda _: (torch.randn(3), {"a": torch.ones(3)})), at_most=2)
def writes_into_a_dict_it_is_given():
    def program(x, store):
        store["sum"] = x + store["a"]
        return x * 2

    return program


@scenario(
    calls(together=lambda _: (torch.randn(3), types.SimpleNamespace(hidden=torch.ones(3)))),
    eagerly=True,
)
def writes_onto_an_object_it_is_given():
    def program(x, state):
        state.hidden = state.hidden + x
        return state.hidden * 2

    return program


@scenario(calls(X), at_most=2)
def clears_and_refills_a_list():
    def forward(self, x):
        self.outputs.clear()
        for scale in (1.0, 2.0):
            self.outputs.append(x * scale)
        return sum(self.outputs)

    return Stateful(forward, outputs=[])


@scenario(calls(X), at_most=1)
def undoes_what_it_wrote_before_it_returns():
    def forward(self, x):
        self.stack.append(x * 2)
        return self.stack.pop() + 1

    return Stateful(forward, stack=[])


# State that only a first call writes


@scenario(calls(normal(4, 4)), at_most=1)
def builds_a_mask_on_the_first_call():
    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril()
        return x * self.mask

    return Stateful(forward, mask=None)


@scenario(calls(normal(2, 3)), calls(normal(4, 3)), calls(normal(2, 3)))
def fills_a_memo_by_size():
    def forward(self, x):
        size = x.shape[0]
        if size not in self.memo:
            self.memo[size] = torch.arange(float(size)).unsqueeze(1)
        return x + self.memo[size]

    return Stateful(forward, memo={})


@scenario(calls(growing(3, by=(1,)), times=8))
def rebuilds_a_table_when_the_input_outgrows_it():
    def forward(self, x):
        if self.table.shape[0] < x.shape[0]:
            self.table = torch.arange(2.0 * x.shape[0])
        return x + self.table[: x.shape[0]]

    return Stateful(forward, table=torch.arange(4.0))


@scenario(calls(X), at_most=1)
def raises_a_flag_once():
    def forward(self, x):
        if not self.has_warned:
            self.has_warned = True
        return x * 2

    return Stateful(forward, has_warned=False)


# What a graph cannot do


@scenario(calls(X), eagerly=True)
def prints_on_every_call():
    def program(x):
        print("called")
        return x * 2

    return program


@scenario(calls(X), eagerly=True)
def writes_a_line_to_a_file():
    file = io.StringIO()

    def program(x):
        file.write("line\n")
        return x * 2

    return Program(program, types.SimpleNamespace(read=file.getvalue))


LOG = logging.getLogger("soundness")


class Records(logging.Handler):
    def __init__(self, records):
        super().__init__()
        self.records = records

    def emit(self, record):
        self.records.append(record.getMessage())


@scenario(calls(X), eagerly=True)
def logs_on_every_call_at_a_level_that_is_on():
    records = []
    LOG.handlers[:] = [Records(records)]
    LOG.setLevel(logging.INFO)

    def program(x):
        LOG.info("called")
        return x * 2

    return Program(program, records)


@scenario(calls(X), change(lambda _: LOG.setLevel(logging.DEBUG)), calls(X), eagerly=True)
def logs_once_the_level_is_turned_on():
    records = []
    LOG.handlers[:] = [Records(records)]
    LOG.setLevel(logging.WARNING)

    def program(x):
        LOG.debug("called")
        return x * 2

    return Program(program, records)


@scenario(calls(X), eagerly=True)
def keeps_the_last_three_in_a_deque():
    def forward(self, x):
        self.window.append(x * 2)
        return sum(self.window)

    return Stateful(forward, window=collections.deque(maxlen=3))


@scenario(calls(X), eagerly=True)
def takes_the_next_of_an_iterator():
    def forward(self, x):
        return x * next(self.scales)

    return Program(Stateful(forward, scales=iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])), None)


@scenario(calls(X), eagerly=True)
def writes_to_standard_output_without_printing():
    def program(x):
        sys.stdout.write("called\n")
        return x * 2

    return program


@scenario(calls(X), eagerly=True)
def counts_in_an_environment_variable():
    def program(x):
        count = int(os.environ["SOUNDNESS_CALLS"]) + 1
        os.environ["SOUNDNESS_CALLS"] = str(count)
        return x * count

    os.environ["SOUNDNESS_CALLS"] = "0"
    return program


@scenario(calls(X), change(lambda _: LOG.setLevel(logging.DEBUG)), calls(X), at_most=2)
def follows_a_level_that_it_asks_for():
    LOG.handlers[:] = []
    LOG.setLevel(logging.WARNING)
    return lambda x: x * (2 if LOG.isEnabledFor(logging.DEBUG) else 3)


class Folder:
    """Says whether a folder is there, and removes it."""

    def __init__(self):
        self.path = pathlib.Path(tempfile.mkdtemp()) / "made"

    def __iter__(self):
        is_there = self.path.exists()
        if is_there:
            self.path.rmdir()
        return iter([is_there])

    def __len__(self):
        return 1


@scenario(calls(X), eagerly=True)
def makes_a_folder_on_every_call():
    folder = Folder()
    path = folder.path

    def program(x):
        path.mkdir(exist_ok=True)
        return x * 2

    return Program(program, folder)


@scenario(calls(X), eagerly=True)
def writes_a_file_on_every_call():
    folder = Folder()
    path = folder.path.parent / "notes"

    def program(x):
        path.write_text("called")
        return x * 2

    return Program(program, None)


@scenario(calls(X), at_most=1)
def asks_whether_a_file_is_there():
    return lambda x: x * 2 if pathlib.Path(os.devnull).exists() else x * 3


@scenario(calls(X), at_most=1)
def writes_into_memory_of_its_own():
    def program(x):
        text = io.StringIO()
        text.write("called")
        return x * len(text.getvalue())

    return program


@scenario(calls(X), eagerly=True)
def advances_a_context_variable():
    position = contextvars.ContextVar("position", default=0)

    def program(x):
        position.set(position.get() + 1)
        return x * position.get()

    return program


@scenario(calls(X), eagerly=True)
def counts_in_the_thread():
    local = threading.local()
    local.calls = 0

    def program(x):
        local.calls += 1
        return x * local.calls

    return Program(program, local)


@scenario(calls(X), eagerly=True)
def registers_one_more_hook_on_every_call():
    def forward(self, x):
        self.linear.register_forward_hook(lambda module, args, out: out + 1)
        return self.linear(x)

    return Stateful(forward, linear=nn.Linear(3, 3))


@scenario(calls(X, times=10), at_most=3)
def carries_a_buffer_that_it_rebinds():
    def forward(self, x):
        self.average = self.average * 0.9 + x * 0.1
        return x - self.average

    net = Stateful(forward)
    net.register_buffer("average", torch.zeros(3))
    return net


@scenario(calls(together=lambda _: (torch.randn(3), [3.0, 1.0], {"a": 1.0, "b": 2.0})))
def sorts_and_empties_the_containers_it_is_given():
    def program(x, items, options):
        items.sort()
        options["c"] = options.pop("a")
        items.append(x * 2)
        return x * items[0]

    return program


@scenario(calls(X))
def binds_a_global_for_the_length_of_the_call():
    def program(x):
        global TEMPORARY
        TEMPORARY = x * 2
        result = TEMPORARY + 1
        del TEMPORARY
        return result

    return program


@scenario(calls(X), change(lambda net: net.share()), calls(X), eagerly=True)
def notices_that_two_of_its_tensors_become_one():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = torch.zeros(3), torch.zeros(3)

        def share(self):
            self.two = self.one[:]

        def forward(self, x):
            self.one += x
            return self.two * 2 + x

    return Sharing()
