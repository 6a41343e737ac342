"""What tensors can be like: dtypes, layouts, sizes, views, writes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchbay.testing._groups import Case, Groups, selected
from torchbay.testing._subject import Subject

__all__ = ["NumericsTests"]

Inputs = tuple[Tensor, ...]
Computation = Callable[..., object]
Table = dict[str, tuple[Computation, Callable[[], Inputs]]]


def _numbers(*sizes: int) -> Tensor:
    """Return numbers of both signs, none of them close to another."""
    count = torch.Size(sizes).numel()
    return (torch.arange(count, dtype=torch.float32) * 0.37 - 0.11 * count).reshape(sizes)


def _as(dtype: torch.dtype) -> Callable[[], Inputs]:
    values = _numbers(3, 4) * (1 if dtype.is_floating_point or dtype.is_complex else 4)
    if dtype is torch.uint8:
        values = values.abs()
    if dtype is torch.bool:
        values = values.relu()
    return lambda: (values.to(dtype), values.flip(0).to(dtype))


def _float(x: Tensor, y: Tensor) -> Inputs:
    return x * y + x, (x - y).exp().sum(0), x.abs().sqrt(), x @ y.t(), x.softmax(-1), x > y


def _complex(x: Tensor, y: Tensor) -> Inputs:
    return x * y + x, x.abs(), x @ y.t(), x.conj() * y, torch.view_as_real(x)


def _int(x: Tensor, y: Tensor) -> Inputs:
    return x + y, x * y, x.sum(), x.cumsum(0), torch.maximum(x, y), x // (y.abs() + 1), x > y


def _bool(x: Tensor, y: Tensor) -> Inputs:
    return x & y, x | ~y, x ^ y, x.any(0), x.all(), x.sum(), torch.where(x, 1.0, 2.0)


def _large() -> Inputs:
    # float32 cannot hold these; a backend that computes integers in it is found out.
    values = torch.arange(12).reshape(3, 4) + 2**53
    return values, values.flip(0)


DTYPES: Table = {
    **{str(kind)[6:]: (_float, _as(kind)) for kind in (torch.float32, torch.float64)},
    **{str(kind)[6:]: (_float, _as(kind)) for kind in (torch.float16, torch.bfloat16)},
    **{str(kind)[6:]: (_complex, _as(kind)) for kind in (torch.complex64, torch.complex128)},
    **{str(kind)[6:]: (_int, _as(kind)) for kind in (torch.int8, torch.int16, torch.int32)},
    **{str(kind)[6:]: (_int, _as(kind)) for kind in (torch.uint8, torch.int64)},
    "int64 beyond floats": (lambda x, y: (x + 1, x - y, x.sum(0), torch.maximum(x, y)), _large),
    "bool": (_bool, _as(torch.bool)),
}


def _touch(x: Tensor) -> Inputs:
    return x * 2 + 1, x.sum(0), x.relu(), x.flatten().cumsum(0)


LAYOUTS: Table = {
    "transposed": (_touch, lambda: (_numbers(4, 3).t(),)),
    "permuted": (_touch, lambda: (_numbers(2, 3, 4).permute(2, 0, 1),)),
    "strided": (_touch, lambda: (_numbers(6, 8)[::2, 1::3],)),
    "with an offset": (_touch, lambda: (_numbers(5, 4)[2:],)),
    "expanded": (_touch, lambda: (_numbers(3, 1).expand(3, 4),)),
    "channels last": (
        lambda x: (nn.functional.avg_pool2d(x, 2), x * 2),
        lambda: (_numbers(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),),
    ),
    "two layouts at once": (
        lambda x, y: (x + y, torch.where(x > y, x, y)),
        lambda: (_numbers(3, 4), _numbers(4, 3).t()),
    ),
}

SIZES: Table = {
    "no elements": (
        lambda x: (x + 1, x.sum(), x.sum(0), torch.cat([x, x]), x.t() @ x),
        lambda: (torch.empty(0, 4),),
    ),
    "no dimensions": (
        lambda x, y: (x * 2, x + y, x.reshape(1), y.sum(), x > 0),
        lambda: (torch.tensor(1.5), _numbers(3)),
    ),
    "one element": (
        lambda x: (x * 2, x.squeeze(), x.sum(), x.softmax(0)),
        lambda: (_numbers(1, 1),),
    ),
    "many dimensions": (
        lambda x: (x * 2, x.sum((1, 3)), x.flatten(2)),
        lambda: (_numbers(2, 3, 1, 2, 3, 2),),
    ),
    "odd sizes": (lambda x: (x @ x.t(), x.sum(1), x.exp()), lambda: (_numbers(7, 13) * 0.01,)),
}

BROADCASTING: Table = {
    "rows with columns": (
        lambda x, y: (x + y, x * y, x - y),
        lambda: (_numbers(3, 1), _numbers(1, 4)),
    ),
    "fewer dimensions": (
        lambda x, y: (x / (y.abs() + 1), x.pow(2) * y),
        lambda: (_numbers(2, 3, 4), _numbers(4)),
    ),
    "batches of matrices": (lambda x, y: x @ y, lambda: (_numbers(2, 1, 3, 4), _numbers(5, 4, 2))),
    "a mask": (
        lambda x, y: x.masked_fill(y > 0, -1.0),
        lambda: (_numbers(2, 3, 4), _numbers(3, 1)),
    ),
}

PROMOTION: Table = {
    "int with float": (lambda x, y: (x + y, x * y, x / 2), lambda: (torch.arange(4), _numbers(4))),
    "half with float": (lambda x, y: (x + y, x * y), lambda: (_numbers(4).half(), _numbers(4))),
    "scalars": (
        lambda x: (x + 1, x + 1.5, x * True, x // 2, x / 2, x**2),
        lambda: (torch.arange(1, 5),),
    ),
    "bool with int": (lambda x: (x + x, x * 3, x.sum()), lambda: (torch.tensor([True, False]),)),
    "no dimensions": (
        lambda x, y: (x + y, x * y),
        lambda: (_numbers(3), torch.tensor(2.0, dtype=torch.float64)),
    ),
    "casts": (
        lambda x: (x.int(), x.double(), x.bool(), x.half(), x.to(torch.uint8)),
        lambda: (_numbers(3, 4).abs(),),
    ),
    "there and back": (lambda x: x.half().float(), lambda: (_numbers(3, 4),)),
}

SPECIAL_VALUES: Table = {
    "nan and infinity": (
        lambda x: (
            x + 1,
            x.relu(),
            x.clamp(-1, 1),
            x.amax(),
            x.exp(),
            x.isnan(),
            x == x.t(),
        ),
        lambda: (torch.tensor([[1.0, torch.inf], [-torch.inf, torch.nan]]),),
    ),
    "infinity times zero": (lambda x: x * 0, lambda: (torch.tensor([1.0, torch.inf]),)),
    "negative zero": (
        lambda x: (1 / x, torch.copysign(torch.ones_like(x), x)),
        lambda: (torch.tensor([0.0, -0.0]),),
    ),
}

VIEWS: Table = {
    "slices": (lambda x: (x[1:, ::2] + 1, x[..., -1], x[None, :, 1]), lambda: (_numbers(4, 6),)),
    "reshapes": (
        lambda x: (x.view(2, 12) * 2, x.t().reshape(-1), x.unflatten(1, (2, 3)), x.unfold(1, 2, 2)),
        lambda: (_numbers(4, 6),),
    ),
    "a result twice": (lambda x: _thrice(x + 1), lambda: (_numbers(3, 4),)),
    "the input itself": (lambda x: (x, x + 1, x.t()), lambda: (_numbers(3, 4),)),
    "a write through a view": (lambda x: _written(x.clone()), lambda: (_numbers(4, 6),)),
}


def _thrice(x: Tensor) -> Inputs:
    return x, x, x.t()


def _written(x: Tensor) -> Tensor:
    x[1:, ::2] += 1
    x.t()[0].mul_(2)
    return x


def _accumulate(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y).mul_(2)
    return x.sum(0)


IN_PLACE: Table = {
    "arithmetic": (_accumulate, lambda: (_numbers(3, 4), _numbers(3, 4))),
    "part of the input": (lambda x: x[1:].mul_(2).sum(), lambda: (_numbers(3, 4),)),
    "a transposed input": (lambda x: x.add_(1).sum(), lambda: (_numbers(3, 4).t(),)),
    "another dtype": (lambda x, y: x.add_(y) * 1.5, lambda: (_numbers(4), torch.arange(4))),
    "index_put": (
        lambda x, i: x.index_put_((i,), x[:2] + 1) * 1,
        lambda: (_numbers(3, 4), torch.tensor([2, 0])),
    ),
    "copy": (lambda x, y: x.copy_(y) + 1, lambda: (_numbers(3, 4), _numbers(4))),
}

TOPICS: dict[str, Table] = {
    "dtypes": DTYPES,
    "layouts": LAYOUTS,
    "sizes": SIZES,
    "broadcasting": BROADCASTING,
    "promotion": PROMOTION,
    "special values": SPECIAL_VALUES,
    "views": VIEWS,
    "in place": IN_PLACE,
}
"""Topic -> its computations and the inputs of each."""


class Applied(nn.Module):
    """Calls a function."""

    def __init__(self, function: Computation) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


def _case(key: str, device: torch.device) -> Case:
    topic, _, name = key.partition(": ")
    function, make_inputs = TOPICS[topic][name]
    inputs = tuple(tensor.to(device) for tensor in make_inputs())
    return Case(module=Applied(function), inputs=inputs, truth=Applied(function))


def _about(topic: str) -> pytest.MarkDecorator:
    keys = [f"{topic}: {name}" for name in TOPICS[topic]]
    return pytest.mark.parametrize("computation", keys, ids=list(TOPICS[topic]))


class NumericsTests:
    """One test for each computation; they share graphs."""

    family = "numerics"

    @pytest.fixture(scope="class")
    def numeric_results(self, request: pytest.FixtureRequest, subject: Subject) -> Groups:
        """Return what the backend makes of the computations that are to run."""
        makers = {
            key: functools.partial(_case, key, subject.device)
            for key in selected(request, "computation")
        }
        return Groups(subject, makers)

    @_about("dtypes")
    def test_dtypes(self, numeric_results: Groups, computation: str) -> None:
        """Computes in every dtype it takes.

        `Capabilities.dtypes`: "Element types it takes, or None for all of them."
        """
        numeric_results.check(computation)

    @_about("layouts")
    def test_layouts(self, numeric_results: Groups, computation: str) -> None:
        """Reads tensors by their strides.

        `CompileRequest.example_inputs`: "One fake tensor (or symbolic int) per placeholder, in order."
        """
        numeric_results.check(computation)

    @_about("sizes")
    def test_sizes(self, numeric_results: Groups, computation: str) -> None:
        """Takes tensors with no elements, no dimensions, or many.

        `Backend.compile`: "Compile ``request.graph``."
        """
        numeric_results.check(computation)

    @_about("broadcasting")
    def test_broadcasting(self, numeric_results: Groups, computation: str) -> None:
        """Broadcasts as PyTorch does.

        `Backend.compile`: "Compile ``request.graph``."
        """
        numeric_results.check(computation)

    @_about("promotion")
    def test_promotion(self, numeric_results: Groups, computation: str) -> None:
        """Promotes dtypes as PyTorch does.

        `Backend.compile`: "Compile ``request.graph``."
        """
        numeric_results.check(computation)

    @_about("special values")
    def test_special_values(self, numeric_results: Groups, computation: str) -> None:
        """Keeps NaN, infinities and the sign of zero.

        `Backend.compile`: "Compile ``request.graph``."
        """
        numeric_results.check(computation)

    @_about("views")
    def test_views(self, numeric_results: Groups, computation: str) -> None:
        """Returns and writes through views as PyTorch does.

        `Executable.run`: "Returns the graph's outputs in order."
        """
        numeric_results.check(computation)

    @_about("in place")
    def test_in_place(self, numeric_results: Groups, computation: str) -> None:
        """Changes the inputs that the call changes, and only those.

        `Capabilities.mutation`: "Without it such values are further outputs, and the core writes them back."
        """
        numeric_results.check(computation)
