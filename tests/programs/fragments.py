"""What programs are made of: source with holes for tensors, and the shapes that come out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch.nn import functional

__all__ = [
    "BINARY",
    "COMPUTED",
    "DATA_CONDITIONS",
    "PAIR_WRITES",
    "RANDOM",
    "RANDOM_WRITES",
    "ROWS",
    "SIZE_CONDITIONS",
    "VIEWS",
    "WIDTH",
    "WRITES",
    "Shape",
    "Term",
    "applied",
    "fixed",
    "rows",
    "valid_among",
]

ROWS = (4, 2, 1, 3)
"""How many rows the tensors of a call may have; one of them equals the width on purpose."""

WIDTH = 3

Shape = tuple[tuple[int, ...], ...]
"""A tensor's sizes, once for each of `ROWS`."""

_MOST_ELEMENTS = 64

VIEWS = (
    "{0}.t()",
    "{0}[0]",
    "{0}[-1]",
    "{0}[1:]",
    "{0}[:-1]",
    "{0}[::2]",
    "{0}[:]",
    "{0}[:, 0]",
    "{0}[:, 1:]",
    "{0}[..., :2]",
    "{0}[None]",
    "{0}.reshape(-1)",
    "{0}.flatten()",
    "{0}.ravel()",
    "{0}.unsqueeze(-1)",
    "{0}.expand(2, -1, -1)",
    "{0}.expand(2, -1)",
    "{0}.expand_as({0})",
    "{0}.diagonal()",
    "{0}.narrow(0, 0, 1)",
    "{0}.chunk(2)[0]",
    "{0}.split(1)[-1]",
    "{0}.unbind()[0]",
    "{0}.detach()",
    "{0}.data",
    "{0}.contiguous()",
    "{0}.float()",
    "{0}.to(torch.float32)",
    "{0}.view_as({0})",
    "{0}.real",
    "{0}.movedim(0, -1)",
    "{0}.select(-1, 0)",
    "{0}.squeeze(0)",
    "{0}.mT",
    "{0}.unfold(0, 1, 1)",
    "torch.atleast_1d({0})",
    "torch.broadcast_to({0}, {0}.shape)",
    "{0}.as_strided((2,), (1,))",
)

COMPUTED = (
    "{0} + 1",
    "{0} * 0.5",
    "-{0}",
    "{0}.relu()",
    "{0}.abs()",
    "{0}.clone()",
    "{0}.sum()",
    "{0}.sum(0)",
    "{0}.sum(-1, keepdim=True)",
    "{0}.mean()",
    "{0}.cumsum(0)",
    "{0}.sort(0).values",
    "{0}.clamp(-1, 1)",
    "{0} * ({0} > 0)",
    "torch.where({0} > 0, {0}, -1.0)",
    "{0}.roll(1, 0)",
    "{0}.flip(0)",
    "{0}.amax(-1)",
    "torch.cat([{0}, {0}])",
    "torch.stack([{0}, {0} + 1])",
    "{0}.masked_fill({0} < 0, 0.5)",
    "{0} @ {0}.t()",
    "{0}.round()",
    "torch.zeros_like({0})",
    "torch.ones({0}.shape[0])",
    "{0} + {0}.shape[0]",
    "torch.full_like({0}, {0}.numel())",
    "torch.arange({0}.shape[0], dtype=torch.float32)",
    "{0}.new_zeros(2)",
    "{0}[{0} > 0].sum()",
    "{0}[torch.tensor([0, 0])]",
    "{0} * k",
    "{0} + scale",
    "{0}[:k].sum(0)",
    "{0}.long().float()",
    "({0} > 0).float()",
    "{0} * {0}.sum().item()",
    "{0}.repeat(2, 1)",
    "functional.pad({0}, (0, 1))",
    "functional.layer_norm({0}, {0}.shape[-1:])",
    "torch.tril({0})",
    "sum([{0}, {0}])",
    "helper({0})",
)

BINARY = (
    "{0} + {1}",
    "{0} * {1}",
    "{0} - {1}",
    "torch.maximum({0}, {1})",
    "torch.where({0} > 0, {0}, {1})",
    "{0}.add({1}, alpha=2)",
    "torch.cat([{0}, {1}])",
    "torch.stack([{0}, {1}])",
    "{0} @ {1}.t()",
    "torch.outer({0}, {1})",
    "{0}.lerp({1}, 0.5)",
    "{0}.index_add(0, torch.tensor([0]), {1})",
)

RANDOM = (
    "torch.rand_like({0})",
    "torch.randn({0}.shape)",
    "functional.dropout({0}, 0.5)",
    "torch.bernoulli({0}.sigmoid())",
    "{0} + torch.rand(())",
    "torch.randperm({0}.shape[0]).float()",
    "torch.randint(0, 5, {0}.shape).float()",
)

WRITES = (
    "{0}.add_(1)",
    "{0}.mul_(0.5)",
    "{0}.zero_()",
    "{0}.fill_(0.25)",
    "{0}.relu_()",
    "{0}.neg_()",
    "{0}.clamp_(-1, 1)",
    "{0}.copy_({0}.flip(0))",
    "{0}.sub_({0}.mean())",
    "{0}.cumsum_(0)",
    "{0}.masked_fill_({0} > 1, 0.0)",
    "{0}.index_fill_(0, torch.tensor([0]), 1.0)",
    "{0}.view(torch.int32).bitwise_and_(-4)",
    "{0}.data.add_(1)",
    "{0}.detach().mul_(2)",
    "{0}.add_(k)",
    "{0}.mul_(scale)",
    "{0}[0] = 1.5",
    "{0}[1:] = 0.0",
    "{0}[..., 0] += 1",
    "{0}[{0} > 0] = 2.0",
    "{0}[:] = {0}.sum()",
    "torch.add({0}, 1, out={0})",
    "torch.abs({0}, out={0})",
    "helper_({0})",
)

PAIR_WRITES = (
    "{0}.add_({1})",
    "{0}.mul_({1})",
    "{0}.copy_({1})",
    "{0}[:] = {1}",
    "{0}.sub_({1} * 2)",
    "{0}.add_({1}.sum())",
    "torch.add({0}, {1}, out={0})",
    "torch.mul({1}, 2, out={0})",
    "{0}.addcmul_({1}, {1})",
    "{0}.lerp_({1}, 0.5)",
    "{0}.scatter_add_(0, torch.zeros_like({1}, dtype=torch.long), {1})",
)

RANDOM_WRITES = (
    "{0}.normal_()",
    "{0}.uniform_()",
    "{0}.bernoulli_(0.5)",
    "{0}.exponential_()",
    "{0}.random_(4)",
    "functional.dropout({0}, 0.5, inplace=True)",
)

DATA_CONDITIONS = (
    "{0}.sum() > 0",
    "({0} > 1).any()",
    "{0}.mean().item() < 0.25",
    "float({0}.sum()) > 1",
    "({0} == 0).all()",
    "torch.equal({0}, {0}.abs())",
    "len({0}.nonzero()) > 2",
    "{0}.amax() > 1.5",
    "not {0}.sum() > 0",
)

SIZE_CONDITIONS = (
    "{0}.shape[0] > 2",
    "len({0}) == 1",
    "{0}.numel() % 2 == 0",
    "{0}.is_contiguous()",
    "{0}.dim() == 2",
    "{0}.stride(0) == 1",
    "{0}.shape[0] == {0}.shape[-1]",
)


@attrs.frozen
class Term:
    """An expression for a tensor.

    Attributes:
        source: What stands in the program.
        shape: Its sizes.
        is_dense: Whether each element is one place in memory, so that it may be written.
    """

    source: str
    shape: Shape
    is_dense: bool = True


def rows(*columns: int) -> Shape:
    """Return the shape of a tensor with as many rows as the call decides."""
    return tuple((count, *columns) for count in ROWS)


def fixed(*sizes: int) -> Shape:
    """Return the shape of a tensor that is the same in every call."""
    return (sizes,) * len(ROWS)


def applied(template: str, *terms: Term, is_view: bool = False) -> Term | None:
    """Return what a template gives for these tensors, or None where PyTorch refuses it."""
    made = _outcome(template, tuple(term.shape for term in terms))
    if made is None:
        return None
    shape, is_dense = made
    # PyTorch functionalizes no write through as_strided().
    is_dense = is_dense and "as_strided" not in template
    if is_view:
        is_dense = is_dense and terms[0].is_dense
    return Term(template.format(*(term.source for term in terms)), shape, is_dense)


def valid_among(templates: Sequence[str], *terms: Term) -> list[str]:
    """Return the statements or conditions that PyTorch takes about these tensors."""
    shapes = tuple(term.shape for term in terms)
    return [t for t in templates if _attempt(_function(t), shapes) is not None]


@functools.cache
def _outcome(template: str, shapes: tuple[Shape, ...]) -> tuple[Shape, bool] | None:
    results = _attempt(_function(template), shapes)
    if results is None or not all(isinstance(r, torch.Tensor) for r in results):
        return None
    ranks = {result.dim() for result in results}
    largest = max(result.numel() for result in results)
    if len(ranks) > 1 or max(ranks) > 3 or largest > _MOST_ELEMENTS:
        return None
    if results[0].dtype != torch.float32:
        return None
    return tuple(tuple(r.shape) for r in results), all(map(_is_dense, results))


def _is_dense(tensor: torch.Tensor) -> bool:
    places = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(stride == 0 and size > 1 for size, stride in places)


@functools.cache
def _attempt(function: Any, shapes: tuple[Shape, ...]) -> tuple[Any, ...] | None:
    """Run a fragment on tensors of each of the sizes; None if any of them raises."""
    results = []
    for position in range(len(ROWS)):
        tensors = [torch.zeros(shape[position]) for shape in shapes]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                results.append(function(*tensors))
        except (IndexError, RuntimeError, TypeError, ValueError, UserWarning):
            return None
    return tuple(results)


@functools.cache
def _function(template: str) -> Any:
    """Return a fragment as a function of its tensors."""
    body = template.format("first", "second")
    names: dict[str, Any] = {"torch": torch, "functional": functional, "k": 2, "scale": 0.5}
    names |= {"helper": lambda t: t.abs() + 1, "helper_": lambda t: t.mul_(2)}
    try:
        code = compile(f"def run(first, second=None):\n    return {body}\n", template, "exec")
    except SyntaxError:
        code = compile(f"def run(first, second=None):\n    {body}\n", template, "exec")
    exec(code, names)
    return names["run"]
