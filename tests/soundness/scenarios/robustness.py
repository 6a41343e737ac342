"""Robustness of capture: threads, transforms, other tracers, exceptions and plain Python inside."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint

from scenarios._scenario import Program, calls, constant, given, normal, scenario

X = normal(3)
UP, DOWN = constant([1.0, 2.0, 3.0]), constant([-1.0, -2.0, -3.0])
_PATIENCE = 60


def _mlp():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


# Threads


def _in_threads(program):
    """Call a program from eight threads that start together, as one call."""

    def call(*args):
        start = threading.Barrier(8, timeout=_PATIENCE)

        def run(number):
            torch.set_grad_enabled(False)
            start.wait()
            return program(*(arg + number for arg in args))

        with ThreadPoolExecutor(8) as pool:
            return [one.result(_PATIENCE) for one in [pool.submit(run, n) for n in range(8)]]

    return call


@scenario(calls(X, through=_in_threads, times=3), at_most=1)
def serves_eight_threads_on_the_first_call():
    return _mlp()


@scenario(
    calls(normal(2, 3), through=_in_threads, times=3),
    calls(normal(4, 3), through=_in_threads, times=3),
)
def serves_eight_threads_with_other_sizes():
    return _mlp()


@scenario(
    calls(UP, through=_in_threads, times=3),
    calls(DOWN, through=_in_threads, times=3),
    at_most=2,
)
def serves_eight_threads_that_branch_on_data():
    return lambda x: x * 2 if x.sum() > 0 else x * 3


@scenario(calls(X, through=_in_threads, times=2), eagerly=True)
def waits_inside_for_other_threads_that_call_it():
    barrier = threading.Barrier(8, timeout=_PATIENCE)

    def program(x):
        barrier.wait()
        return x * 2

    return Program(program, None)


@scenario(calls(X))
def waits_for_a_thread_that_it_starts():
    linear = nn.Linear(3, 3)

    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            results = []
            worker = threading.Thread(target=lambda: results.append(2.0))
            worker.start()
            worker.join(_PATIENCE)
            return self.linear(x) * results[0]

    return Waiting()


@scenario(calls(X), at_most=1)
def takes_a_lock():
    lock = threading.Lock()

    def program(x):
        with lock:
            return x * 2

    return Program(program, None)


def _in_thread_named(name):
    def through(program):
        def call(x):
            results = []
            worker = threading.Thread(target=lambda: results.append(_without_gradients(program, x)))
            worker.name = name
            worker.start()
            worker.join(_PATIENCE)
            return results[0]

        return call

    return through


def _without_gradients(program, x):
    with torch.no_grad():
        return program(x)


@scenario(
    calls(X, through=_in_thread_named("a")), calls(X, through=_in_thread_named("b")), eagerly=True
)
def follows_the_name_of_the_thread():
    return lambda x: x * 2 if threading.current_thread().name == "a" else x * 3


# Exceptions


@scenario(calls(X, "good"), calls(X, "bad", times=2), calls(X, "good"))
def passes_on_the_exceptions_of_the_program():
    def program(x, word):
        if word == "bad":
            raise LookupError(f"no such word: {word}")
        return x * 2

    return program


@scenario(calls(X, X), calls(X, normal(4), times=2), calls(X, X))
def passes_on_the_exceptions_of_operators():
    return lambda x, y: x + y


@scenario(calls(X, False), calls(X, True, times=2), calls(X, False))
def keeps_what_happened_before_an_exception():
    def program(x, fails):
        x.add_(1)
        if fails:
            raise RuntimeError("too late")
        return x * 2

    return program


@scenario(calls(X), at_most=1)
def catches_an_exception_inside():
    def program(x):
        try:
            x = x @ torch.ones(5)
        except RuntimeError:
            x = x * 2
        finally:
            x = x + 1
        return x

    return program


@scenario(calls(), calls(X), calls(X, X, X, times=2))
def raises_what_python_raises_for_the_wrong_arguments():
    return lambda x, y=None: x * 2


# Blocks, transforms and libraries inside


@scenario(calls(normal(2, 3)), at_most=1)
def has_an_autocast_block_inside():
    weight = torch.eye(3)

    def program(x):
        with torch.autocast("cpu", torch.bfloat16):
            inner = x @ weight
        return inner, x @ weight

    return program


@scenario(calls(X), calls(X, under=torch.enable_grad))
def has_blocks_of_grad_mode_inside():
    def program(x):
        with torch.no_grad():
            y = x * 2
        with torch.inference_mode():
            z = (x * 3).sum()
        return y + 1, z + 1

    return program


@scenario(calls(X), at_most=1)
def takes_a_gradient_inside():
    def program(x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((leaf**3).sum(), leaf)
        return slope * 2

    return program


@scenario(calls(normal(4, 3)), at_most=1)
def maps_inside():
    return lambda x: torch.func.vmap(lambda row: row / row.norm())(x)


@scenario(calls(X), at_most=1)
def takes_the_gradient_of_a_function_inside():
    return lambda x: torch.func.grad(lambda y: (y**3).sum())(x)


@scenario(calls(X), at_most=1)
def takes_directional_derivatives_inside():
    return lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones(3),))


@scenario(calls(X), at_most=1)
def takes_a_jacobian_inside():
    return lambda x: (
        torch.func.jacrev(torch.sin)(x),
        torch.func.hessian(lambda y: (y**3).sum())(x),
    )


@scenario(calls(X), at_most=1)
def checkpoints_inside():
    linear = nn.Linear(3, 3)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return checkpoint.checkpoint(self.linear, x, use_reentrant=False) * 2

    return Checkpointed()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


@scenario(calls(X), at_most=1)
def applies_a_function_with_a_backward_of_its_own():
    return lambda x: Cube.apply(x) + 1


@torch.library.custom_op("torchbay_soundness::shifted", mutates_args=())
def shifted(x: torch.Tensor, by: float) -> torch.Tensor:
    """Shift a tensor."""
    return x + by


@shifted.register_fake
def _(x, by):
    return torch.empty_like(x)


@torch.library.custom_op("torchbay_soundness::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor, by: float) -> None:
    """Shift a tensor in place."""
    x.add_(by)


@scenario(calls(X), at_most=1)
def runs_a_custom_operator():
    return lambda x: shifted(x * 2, 3.0) + 1


@scenario(calls(X), eagerly=True)
def runs_a_custom_operator_that_writes():
    def program(x):
        shift_(x, 3.0)
        return x * 2

    return program


@scenario(calls(normal(2, 5, 3)), at_most=1)
def runs_an_lstm():
    return nn.LSTM(3, 4, num_layers=2, batch_first=True)


@scenario(calls(normal(2, 5, 3)), at_most=1)
def runs_a_gru_in_both_directions():
    return nn.GRU(3, 4, bidirectional=True, batch_first=True)


@scenario(calls(normal(2, 5, 8)), at_most=1)
def runs_a_transformer_layer_in_training():
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train()


@scenario(calls(normal(2, 3, 8, 8)), at_most=1)
def runs_convolutions_and_pools():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    ).eval()


@scenario(calls(normal(8)), at_most=1)
def transforms_to_frequencies():
    return lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2)


# Plain Python inside


@scenario(calls(X), at_most=1)
def runs_generators_and_comprehensions():
    def powers(x):
        for n in range(3):
            yield x**n

    return lambda x: sum(part * 2 for part in powers(x)) + max(n for n in [1, 2, 3])


@contextlib.contextmanager
def _doubled(x):
    yield x * 2


@scenario(calls(X), at_most=1)
def enters_a_context_manager_of_the_users():
    def program(x):
        with _doubled(x) as y, contextlib.suppress(ValueError):
            return y + 1

    return program


@scenario(calls(X), at_most=1)
def makes_objects_on_the_way():
    class Box:
        def __init__(self, value):
            self.value = value

        def __add__(self, other):
            return Box(self.value + other.value)

    return lambda x: (Box(x) + Box(x * 2)).value


@scenario(calls(X), at_most=1)
def matches_patterns():
    def program(x):
        match {"kind": "scale", "by": 3.0}:
            case {"kind": "scale", "by": by}:
                return x * by
            case _:
                return x

    return program


LOG = logging.getLogger("soundness.quiet")


@scenario(calls(X), at_most=1)
def logs_at_a_level_that_is_off():
    LOG.setLevel(logging.WARNING)

    def program(x):
        LOG.debug("sum is unknown")
        return x * 2

    return Program(program, None)


@scenario(calls(given(lambda _: 3), X), at_most=1)
def calls_itself():
    def power(n, x):
        return x if n == 0 else power(n - 1, x) * x

    return power


# Under other tracers and transforms


def _then_plain(through):
    return [*calls(X, times=2, through=through), *calls(X), *calls(X, times=2, through=through)]


@scenario(_then_plain(lambda program: torch.vmap(program)), calls(normal(2, 3)))
def runs_inline_under_vmap():
    return lambda x: x * 2 + 1


def _slope(program):
    return torch.func.grad(lambda x: program(x).sum())


@scenario(_then_plain(_slope))
def runs_inline_under_a_gradient_transform():
    return lambda x: x**3


def _traced(program):
    return lambda x: make_fx(program)(x)(x)


@scenario(_then_plain(_traced))
def runs_inline_under_make_fx():
    return lambda x: torch.relu(x) * 2


def _under_fakes(program):
    def call(x):
        with FakeTensorMode() as mode:
            return tuple(program(mode.from_tensor(x)).shape)

    return call


@scenario(_then_plain(_under_fakes))
def runs_inline_under_a_fake_mode_of_somebody_else():
    return lambda x: torch.cat([x, x]) * 2


def _recompiled(program):
    return torch.compile(lambda x: program(x) + 1, backend="eager")


@scenario(_then_plain(_recompiled))
def runs_inline_under_torch_compile():
    return lambda x: torch.relu(x) * 2


def _exported(program):
    class Around(nn.Module):
        def forward(self, x):
            return program(x)

    return lambda x: torch.export.export(Around(), (x,)).module()(x)


@scenario(_then_plain(_exported))
def runs_inline_under_export():
    return lambda x: torch.relu(x) * 2


@scenario(calls(X), at_most=1)
def runs_another_compiled_callable_inline():
    import torchbay

    inner = torchbay.compile(lambda x: x * 2, backend="eager")
    return Program(lambda x: inner(x) + 1, None)
