"""Read from Python: whatever the program read, a later change of it reaches the next call."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import importlib
import operator
import os
import pickle
import random
import threading
import time
import types
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

from scenarios._scenario import Program, calls, change, normal, restored, scenario

X = normal(3)
rebind = globals().update


class Mode(enum.Enum):
    ADD = "add"
    SCALE = "scale"


class Net(nn.Module):
    """A module with a bit of everything that forwards read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0
        self.eval()

    def forward(self, x):
        return self.drop(self.linear(x)) * self.scale


# Globals


@scenario(calls(X), change(lambda _: rebind(SCALE=3.0)), calls(X), at_most=2, says=("SCALE",))
def follows_a_global_number():
    rebind(SCALE=2.0)
    return lambda x: x * SCALE  # noqa: F821


@scenario(calls(X), change(lambda _: rebind(KIND="tanh")), calls(X), at_most=2, says=("KIND",))
def follows_a_global_string():
    rebind(KIND="relu")
    return lambda x: getattr(torch, KIND)(x)  # noqa: F821


@scenario(calls(X), change(lambda _: rebind(MODE=Mode.SCALE)), calls(X), at_most=2)
def follows_a_global_enum():
    rebind(MODE=Mode.ADD)
    return lambda x: x + 2 if MODE is Mode.ADD else x * 2  # noqa: F821


@scenario(calls(X), change(lambda _: rebind(OFFSET=torch.ones(3))), calls(X), at_most=2)
def follows_a_global_that_was_none():
    rebind(OFFSET=None)
    return lambda x: x if OFFSET is None else x + OFFSET  # noqa: F821


@scenario(calls(X), change(lambda _: rebind(IS_ON=True)), calls(X), at_most=2)
def follows_a_global_flag():
    rebind(IS_ON=False)
    return lambda x: x * 2 if IS_ON else x * 3  # noqa: F821


def _double(x):
    return x * 2


def _triple(x):
    return x * 3


@scenario(calls(X), change(lambda _: rebind(transform=_triple)), calls(X), at_most=2)
def follows_a_global_function_that_is_rebound():
    rebind(transform=_double)
    return lambda x: transform(x) + 1  # noqa: F821


@scenario(calls(X), change(lambda _: rebind(TABLE=torch.full((3,), 5.0))), calls(X), at_most=1)
def reads_a_global_tensor_live_when_it_is_rebound():
    rebind(TABLE=torch.ones(3))
    return lambda x: x + TABLE  # noqa: F821


@scenario(calls(X), change(lambda _: SIZES.__setitem__(0, 5.0)), calls(X), at_most=2)  # noqa: F821
def follows_an_element_of_a_global_list():
    rebind(SIZES=[1.0, 2.0])
    return lambda x: x * SIZES[0] + SIZES[1]  # noqa: F821


@scenario(calls(X), change(lambda _: SIZES.append(3.0)), calls(X), at_most=2)  # noqa: F821
def follows_a_global_list_that_grows():
    rebind(SIZES=[1.0, 2.0])
    return lambda x: sum(x * size for size in SIZES)  # noqa: F821


@scenario(calls(X), change(lambda _: OPTIONS.update(scale=4.0)), calls(X), at_most=2)  # noqa: F821
def follows_a_value_of_a_global_dict():
    rebind(OPTIONS={"scale": 2.0})
    return lambda x: x * OPTIONS["scale"]  # noqa: F821


@scenario(calls(X), change(lambda _: OPTIONS.update(bias=4.0)), calls(X), at_most=2)  # noqa: F821
def follows_a_key_that_a_global_dict_gets():
    rebind(OPTIONS={})
    return lambda x: x + OPTIONS.get("bias", 0.0)  # noqa: F821


def _scaled(x):
    return x * FACTOR  # noqa: F821


@scenario(calls(X), change(lambda _: rebind(FACTOR=3.0)), calls(X), at_most=2)
def follows_a_global_that_only_a_function_it_calls_reads():
    rebind(FACTOR=2.0)
    return lambda x: _scaled(x) + _scaled(x)


# Closures and defaults


def _with_setter(initial, program_of):
    """Return a program over a closure's variable, and a function that rebinds the variable."""
    value = initial

    def read():
        return value

    def put(other):
        nonlocal value
        value = other

    program = program_of(read)
    return Program(program, types.SimpleNamespace(put=put, program=program))


@scenario(calls(X), change(lambda world: world.put(3.0)), calls(X), at_most=2)
def follows_a_number_in_a_closure():
    return _with_setter(2.0, lambda read: lambda x: x * read())


@scenario(calls(X), change(lambda world: world.put(3.0)), calls(X), at_most=2)
def follows_a_number_in_a_closure_of_a_closure():
    def program_of(read):
        def outer():
            return lambda x: x * read()

        return outer()

    return _with_setter(2.0, program_of)


@scenario(calls(X), change(lambda world: world.put(torch.full((3,), 7.0))), calls(X), at_most=1)
def reads_a_tensor_in_a_closure_live_when_it_is_rebound():
    return _with_setter(torch.ones(3), lambda read: lambda x: x + read())


@scenario(calls(X), change(lambda weights: weights.append(5.0)), calls(X), at_most=2)
def follows_a_list_in_a_closure():
    weights = [1.0, 2.0]
    return Program(lambda x: x * sum(weights), weights)


@scenario(
    calls(X), change(lambda program: setattr(program, "__defaults__", (5.0,))), calls(X), at_most=2
)
def follows_a_default_argument():
    def program(x, scale=2.0):
        return x * scale

    return program


@scenario(
    calls(X), change(lambda f: setattr(f, "__kwdefaults__", {"scale": 5.0})), calls(X), at_most=2
)
def follows_a_default_of_a_keyword_argument():
    def program(x, *, scale=2.0):
        return x * scale

    return program


@scenario(calls(X), change(lambda part: part.keywords.update(scale=5.0)), calls(X), at_most=2)
def follows_the_arguments_of_a_partial():
    return functools.partial(lambda x, scale: x * scale, scale=2.0)


# Attributes of modules, at any depth


@scenario(
    calls(X), change(lambda net: setattr(net, "scale", 3.0)), calls(X), says=("scale", "2.0", "3.0")
)
def follows_a_number_on_a_module():
    return Net()


@scenario(calls(X), change(lambda net: setattr(net[0][0], "scale", 3.0)), calls(X), at_most=2)
def follows_a_number_on_a_submodule_far_down():
    return nn.Sequential(nn.Sequential(Net()))


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        config = self.config
        return x * config.scale + config.offset


@scenario(calls(X), change(lambda net: setattr(net.config, "scale", 3.0)), calls(X), at_most=2)
def follows_an_attribute_of_a_config_read_through_a_local():
    return Configured(types.SimpleNamespace(scale=2.0, offset=1.0))


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 2.0
    offset: float = 1.0


@scenario(calls(X), change(lambda net: setattr(net, "config", Settings(3.0))), calls(X), at_most=2)
def follows_a_frozen_dataclass_that_is_replaced():
    return Configured(Settings())


class Factor:
    scale = 2.0
    offset = 0.0


@scenario(calls(X), change(lambda world: setattr(world[1], "scale", 9.0)), calls(X), at_most=2)
def follows_an_attribute_of_a_class():
    kind = type("Factor", (Factor,), {"scale": 2.0})
    net = Configured(kind())
    return Program(net, [net, kind])


class Doubling(Net):
    @property
    def doubled(self):
        return self.scale * 2

    def forward(self, x):
        return x * self.doubled


@scenario(calls(X), change(lambda net: setattr(net, "scale", 3.0)), calls(X), at_most=2)
def follows_what_a_property_reads():
    return Doubling()


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = [1.0, 2.0]
        self.table = {"offset": 1.0}
        self.allowed = {"relu"}
        self.activations = [torch.exp, torch.tanh]

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        for activation in self.activations:
            x = activation(x)
        return x + self.table["offset"] + ("relu" in self.allowed)


@scenario(calls(X), change(lambda net: net.scales.__setitem__(1, 7.0)), calls(X), at_most=2)
def follows_an_element_of_a_list_on_a_module():
    return Holding()


@scenario(calls(X), change(lambda net: net.table.update(offset=7.0)), calls(X), at_most=2)
def follows_an_element_of_a_dict_on_a_module():
    return Holding()


@scenario(calls(X), change(lambda net: net.allowed.discard("relu")), calls(X), at_most=2)
def follows_the_members_of_a_set_on_a_module():
    return Holding()


@scenario(calls(X), change(lambda net: net.activations.reverse()), calls(X), at_most=2)
def follows_the_order_of_functions_in_a_list():
    return Holding()


@scenario(calls(X), change(lambda net: setattr(net, "linear", nn.Identity())), calls(X), at_most=2)
def follows_a_submodule_that_is_replaced():
    return Net()


@scenario(calls(X), change(lambda net: net.append(nn.Tanh())), calls(X), at_most=2)
def follows_a_container_of_modules_that_grows():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU())


@scenario(
    calls(X),
    change(lambda net: net.linear.register_forward_hook(lambda m, args, out: out * 10)),
    calls(X),
    at_most=2,
)
def runs_a_hook_that_is_added():
    return Net()


@scenario(
    calls(X),
    change(lambda net: net.linear.register_forward_pre_hook(lambda m, args: (args[0] + 1,))),
    calls(X),
    at_most=2,
)
def runs_a_hook_before_forward_that_is_added():
    return Net()


@scenario(calls(X), change(lambda world: world[1].remove()), calls(X), at_most=2)
def stops_running_a_hook_that_is_removed():
    net = Net()
    return Program(net, [net, net.linear.register_forward_hook(lambda m, args, out: out * 10)])


@scenario(
    calls(X),
    change(
        lambda world: world.append(
            nn.modules.module.register_module_forward_hook(lambda m, args, out: out + 1)
        )
    ),
    calls(X),
    change(lambda world: world.pop().remove()),
    calls(X),
    at_most=2,
)
def runs_a_hook_on_every_module_while_it_is_there():
    return Program(Net(), [])


@scenario(calls(X), change(lambda net: net.train()), calls(X), at_most=2, says=("training",))
def follows_the_training_flag():
    return Net()


@scenario(calls(X), change(lambda net: net.drop.train()), calls(X), at_most=2)
def follows_the_training_flag_of_a_submodule():
    return Net()


class Naming(Net):
    def forward(self, x):
        return x * getattr(self, "scale" + "")


@scenario(calls(X), change(lambda net: setattr(net, "scale", 3.0)), calls(X), at_most=2)
def follows_an_attribute_read_by_a_computed_name():
    return Naming()


class Optional(Net):
    def forward(self, x):
        return x + self.extra if hasattr(self, "extra") else x


@scenario(
    calls(X),
    change(lambda net: setattr(net, "extra", 3.0)),
    calls(X),
    change(lambda net: delattr(net, "extra")),
    calls(X),
    at_most=2,
)
def follows_an_attribute_that_comes_and_goes():
    return Optional()


class Unpacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = {"min": -0.5, "max": 0.5}

    def forward(self, x):
        return torch.clamp(x, **self.options)


@scenario(calls(X), change(lambda net: net.options.update(max=0.1)), calls(X), at_most=2)
def follows_a_dict_that_is_unpacked_into_a_call():
    return Unpacking()


class Slotted:
    __slots__ = ("offset", "scale")

    def __init__(self):
        self.scale, self.offset = 2.0, 1.0


@scenario(calls(X), change(lambda net: setattr(net.config, "scale", 3.0)), calls(X), eagerly=True)
def follows_an_object_with_slots():
    return Configured(Slotted())


@scenario(
    calls(X),
    change(lambda net: setattr(net, "step", types.MethodType(lambda self, x: x * 5, net))),
    calls(X),
    at_most=2,
)
def follows_a_method_replaced_on_an_instance():
    class Stepping(nn.Module):
        def step(self, x):
            return x * 2

        def forward(self, x):
            return self.step(x)

    return Stepping()


@scenario(calls(X, times=3), *[change(lambda net: net.bump()), calls(X, times=1)] * 6, at_most=1)
def compiles_nothing_anew_for_a_counter_that_nobody_reads():
    class Counted(Net):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def bump(self):
            self.steps += 1

    return Counted()


# Ways of reading that name nothing in the program's own code

GET_SCALE = operator.attrgetter("scale")


def _rescale(world):
    world.scale = 3.0


@dataclasses.dataclass
class Knobs:
    scale: float = 2.0


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_attribute_that_only_an_attrgetter_names():
    knobs = Knobs()
    return Program(lambda x: x * GET_SCALE(knobs), knobs)


class Point:
    """Matched by position."""

    __match_args__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_attribute_that_a_pattern_takes_by_position():
    point = Point()

    def program(x):
        match point:
            case Point(value):
                return x * value

    return Program(program, point)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_a_dataclass_that_is_turned_into_a_tuple():
    knobs = Knobs()
    return Program(lambda x: x * dataclasses.astuple(knobs)[0], knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_a_dataclass_that_is_turned_into_a_dict():
    knobs = Knobs()
    return Program(lambda x: x * sum(dataclasses.asdict(knobs).values()), knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_a_dataclass_that_is_compared():
    knobs, usual = Knobs(), Knobs()
    return Program(lambda x: x * 2 if knobs == usual else x * 3, knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_attribute_that_a_format_names():
    knobs = Knobs()
    return Program(lambda x: x * float(f"{knobs.scale}"), knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_attribute_that_a_template_names():
    knobs, template = Knobs(), "{0.scale}"
    return Program(lambda x: x * float(template.format(knobs)), knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_object_that_is_pickled():
    knobs = Knobs()
    return Program(lambda x: (x * 2, pickle.dumps(knobs)), knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_object_whose_copy_is_returned():
    knobs = Knobs()
    return Program(lambda x: (x * 2, copy.copy(knobs)), knobs)


@scenario(calls(X, times=2), change(_rescale), calls(X, times=2), eagerly=True)
def follows_an_attribute_that_a_held_caller_names():
    knobs, get = Knobs(), operator.methodcaller("__getattribute__", "scale")
    return Program(lambda x: x * get(knobs), knobs)


@scenario(calls(X, times=2), change(_rescale), calls(X, times=2), eagerly=True)
def follows_an_object_behind_a_proxy():
    knobs = Knobs()
    proxy = weakref.proxy(knobs)
    return Program(lambda x: x * proxy.scale, knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_attribute_of_a_copy():
    knobs = Knobs()
    return Program(lambda x: x * copy.deepcopy(knobs).scale, knobs)


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_an_object_behind_a_weak_reference():
    knobs = Knobs()
    reference = weakref.ref(knobs)
    return Program(lambda x: x * reference().scale, knobs)


@scenario(calls(X), change(lambda held: held.clear()), calls(X), at_most=2)
def follows_whether_an_object_behind_a_weak_reference_is_there():
    held = [Knobs()]
    reference = weakref.ref(held[0])
    return Program(lambda x: x * 3 if reference() is None else x * 2, held)


@scenario(calls(X), change(lambda inner: inner.update(scale=3.0)), calls(X), eagerly=True)
def follows_a_dict_behind_a_chain_of_dicts():
    inner = {"scale": 2.0}
    chain = collections.ChainMap({}, inner)
    return Program(lambda x: x * chain["scale"], inner)


@scenario(calls(X), change(lambda inner: inner.update(scale=3.0)), calls(X), eagerly=True)
def follows_a_dict_behind_a_view_of_it():
    inner = {"scale": 2.0}
    view = types.MappingProxyType(inner)
    return Program(lambda x: x * view["scale"], inner)


@scenario(calls(X), change(lambda items: items.append(1)), calls(X), eagerly=True)
def follows_what_the_length_of_an_object_reads():
    class Bag:
        def __init__(self):
            self.items = []

        def __len__(self):
            return len(self.items)

    bag = Bag()
    return Program(lambda x: x * 2 if bag else x * 3, bag.items)


class Lookup:
    """Keeps its attributes in a dict; others raise KeyError."""

    def __init__(self):
        self.values = {"scale": 2.0}

    def __getattr__(self, name):
        return self.__dict__["values"][name]


@scenario(calls(X), change(lambda values: values.update(scale=3.0)), calls(X), eagerly=True)
def follows_attributes_that_an_object_looks_up_itself():
    lookup = Lookup()
    return Program(lambda x: x * lookup.scale, lookup.values)


@scenario(calls(X), change(lambda net: setattr(net.linear.weight, "scale", 3.0)), calls(X))
def follows_an_attribute_of_a_parameter():
    class Scaling(Net):
        def forward(self, x):
            return self.linear(x) * self.linear.weight.scale

    net = Scaling()
    net.linear.weight.scale = 2.0
    return net


def _rescale_behind(net):
    net.linear.weight.knobs.scale = 3.0


@scenario(calls(X, times=2), change(_rescale_behind), calls(X, times=2), eagerly=True)
def follows_an_object_that_a_parameter_holds():
    class Scaling(Net):
        def forward(self, x):
            return self.linear(x) * self.linear.weight.knobs.scale

    net = Scaling()
    net.linear.weight.knobs = Knobs()
    return net


@scenario(calls(X), change(lambda program: setattr(program, "scale", 3.0)), calls(X), at_most=2)
def follows_an_attribute_of_a_function():
    def program(x):
        return x * program.scale

    program.scale = 2.0
    return program


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_what_a_cached_function_returns():
    knobs = Knobs()

    @functools.lru_cache
    def settings():
        return knobs

    return Program(lambda x: x * settings().scale, knobs)


def _put_scale(value):
    importlib.import_module("scenarios._imported").SCALE = value


@scenario(calls(X), change(lambda _: _put_scale(3.0)), calls(X), at_most=2)
def follows_a_module_that_is_imported_inside():
    _put_scale(2.0)

    def program(x):
        from scenarios import _imported

        return x * _imported.SCALE

    return Program(program, None)


@scenario(calls(X), change(lambda _: _put_scale(3.0)), calls(X), at_most=2)
def follows_a_name_that_is_imported_inside():
    _put_scale(2.0)

    def program(x):
        from scenarios._imported import SCALE

        return x * SCALE

    return Program(program, None)


@scenario(calls(X, times=2), change(lambda _: rebind(HIDDEN=3.0)), calls(X, times=2), eagerly=True)
def follows_a_global_that_is_evaluated():
    rebind(HIDDEN=2.0)
    return lambda x: x * eval("HIDDEN")


@scenario(
    calls(X, times=2), change(lambda window: window.append(3.0)), calls(X, times=2), eagerly=True
)
def follows_a_global_deque():
    rebind(WINDOW=collections.deque([2.0], maxlen=1))
    return Program(lambda x: x * WINDOW[0], WINDOW)  # noqa: F821 - bound above


@scenario(calls(X), change(lambda _: rebind(HIDDEN=3.0)), calls(X), eagerly=True)
def follows_a_global_that_is_looked_up_by_name():
    rebind(HIDDEN=2.0)
    return lambda x: x * globals()["HIDDEN"]


@scenario(calls(X), change(_rescale), calls(X), eagerly=True)
def follows_a_value_of_the_thread():
    local = threading.local()
    local.scale = 2.0
    return Program(lambda x: x * local.scale, local)


@scenario(
    calls(X),
    change(lambda lock: lock.acquire()),
    calls(X),
    change(lambda lock: lock.release()),
    eagerly=True,
)
def follows_whether_a_lock_is_taken():
    lock = threading.Lock()
    return Program(lambda x: x * 2 if lock.locked() else x * 3, lock)


# Parameters and buffers


def _replace(net):
    net.linear.weight = nn.Parameter(torch.full((3, 3), 0.5))


def _write_data(net):
    net.linear.weight.data.mul_(2)


def _replace_data(net):
    net.linear.weight.data = torch.full((3, 3), 0.25)


def _fewer_outputs(net):
    net.linear.weight.data = torch.full((2, 3), 0.25)
    net.linear.bias.data = torch.zeros(2)


@scenario(calls(X), change(_replace), calls(X), at_most=1)
def reads_a_parameter_that_is_replaced():
    return Net()


@scenario(calls(X), change(_write_data), calls(X), at_most=1)
def reads_a_parameter_written_through_data():
    return Net()


@scenario(calls(X), change(_replace_data), calls(X), at_most=1)
def reads_a_parameter_whose_data_is_replaced():
    return Net()


@scenario(calls(X), change(_fewer_outputs), calls(X), at_most=2)
def recompiles_for_a_parameter_of_another_shape():
    return Net()


@scenario(calls(X), change(lambda net: net.half()), calls(normal(3, dtype=torch.half)), at_most=2)
def recompiles_for_half():
    return Net()


@scenario(calls(X), change(lambda net: net.to(torch.double)), calls(normal(3, dtype=torch.double)))
def recompiles_for_another_dtype_of_the_parameters():
    return Net()


def _load(net):
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


@scenario(calls(X), change(_load), calls(X), at_most=1)
def reads_a_state_dict_that_is_loaded():
    return Net()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


@scenario(
    calls(X),
    change(lambda net: setattr(net.two, "weight", nn.Parameter(torch.ones(3, 3)))),
    calls(X),
    at_most=2,
)
def notices_that_tied_weights_come_apart():
    return Tied()


@scenario(
    calls(X),
    change(lambda net: net.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))),
    calls(X),
    at_most=2,
)
def follows_a_buffer_that_was_none():
    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", None)

        def forward(self, x):
            return x if self.mask is None else x * self.mask

    return Masking()


@scenario(
    calls(X, under=torch.enable_grad),
    change(lambda net: net.requires_grad_(requires_grad=True)),
    calls(X, under=torch.enable_grad, times=1),
    change(lambda net: net.requires_grad_(requires_grad=False)),
    calls(X, under=torch.enable_grad),
)
def follows_requires_grad():
    return Net().requires_grad_(requires_grad=False)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight + weight.mT


@scenario(
    calls(X),
    change(lambda net: parametrize.register_parametrization(net.linear, "weight", Symmetric())),
    calls(X),
    at_most=2,
)
def follows_a_parametrization_that_is_registered():
    return Net()


# Ambient state


def _weighted():
    weight = torch.eye(3)
    return lambda x: x @ weight + torch.is_grad_enabled() + 2 * torch.is_inference_mode_enabled()


@scenario(calls(X), calls(X, under=torch.enable_grad), calls(X), at_most=2)
def follows_grad_mode():
    return _weighted()


@scenario(calls(X), calls(X, under=torch.inference_mode), calls(X), at_most=2)
def follows_inference_mode():
    return _weighted()


def _autocast():
    return torch.autocast("cpu", torch.bfloat16)


@scenario(calls(normal(2, 3)), calls(normal(2, 3), under=_autocast), calls(normal(2, 3)))
def follows_autocast():
    return _weighted()


def _double_by_default():
    return restored(torch.get_default_dtype, torch.set_default_dtype, torch.double)


@scenario(calls(X), calls(X, under=_double_by_default), calls(X), at_most=2)
def follows_the_default_dtype():
    return lambda x: x + torch.ones(3)


@scenario(calls(X), calls(X, under=lambda: torch.device("cpu")), calls(X), at_most=2)
def follows_the_default_device():
    return lambda x: x + torch.ones(3)


def _deterministic():
    return restored(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    )


@scenario(calls(X), calls(X, under=_deterministic), calls(X), at_most=2)
def follows_deterministic_algorithms():
    return lambda x: x * 2 if torch.are_deterministic_algorithms_enabled() else x * 3


def _medium():
    return restored(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    )


@scenario(calls(X), calls(X, under=_medium), calls(X), at_most=2)
def follows_the_precision_of_matrix_products():
    return lambda x: x * len(torch.get_float32_matmul_precision())


# What no graph may keep

CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("CONTEXT", default=1.0)


@scenario(calls(X), change(lambda _: CONTEXT.set(5.0)), calls(X), eagerly=True)
def follows_a_context_variable():
    CONTEXT.set(1.0)
    return lambda x: x * CONTEXT.get()


@scenario(calls(X), change(lambda _: os.environ.update(SOUNDNESS_SCALE="5")), calls(X), at_most=2)
def follows_an_environment_variable():
    os.environ["SOUNDNESS_SCALE"] = "2"
    return lambda x: x * float(os.environ["SOUNDNESS_SCALE"])


@scenario(calls(X), eagerly=True)
def draws_from_the_random_numbers_of_python():
    return lambda x: x * random.random()


@scenario(calls(X), eagerly=True)
def draws_from_the_random_numbers_of_numpy():
    return lambda x: x * float(np.random.rand())  # noqa: NPY002 - the global one


@scenario(calls(X), eagerly=True)
def reads_the_clock_on_every_call():
    now, last = time.monotonic_ns, []

    def program(x):
        moment = now()
        is_later = not last or moment >= last[0]
        last[:] = [moment]
        return x * is_later

    return Program(program, None)
