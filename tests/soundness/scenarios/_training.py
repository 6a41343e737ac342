"""How programs are trained: what a scenario calls in place of the program itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from scenarios._scenario import Call, calls
from torchbay._structure import tensors_in

__all__ = [
    "StateOf",
    "backward",
    "backward_from",
    "changing",
    "differentiated",
    "loss_of",
    "optimized",
    "trained",
]

Way = Callable[[Callable[..., Any]], Callable[..., Any]]


def trained(*parts: Any, by: Way | None = None, **options: Any) -> list[Call]:
    """Return calls with gradients recorded; by default each is followed by a backward pass."""
    under = options.pop("under", torch.enable_grad)
    return calls(*parts, under=under, through=by or backward, **options)


def loss_of(value: Any) -> torch.Tensor:
    """Return a number that depends on every element, on each with a weight of its own."""
    with torch.enable_grad():
        return torch.stack([_weighted(t) for t in tensors_in(value) if t.requires_grad]).sum()


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    weights = torch.arange(1, parts.numel() + 1).reshape(parts.shape) / (parts.numel() + 1)
    return (parts * weights.to(parts.dtype)).double().sum()


def backward(program: Callable[..., Any]) -> Callable[..., Any]:
    """Call the program, then go backward from all it returns."""
    return backward_from(lambda result: result)(program)


def backward_from(choose: Callable[[Any], Any], **options: Any) -> Way:
    """Go backward from a part of what the program returns."""

    def way(program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = program(*args, **kwargs)
            loss_of(choose(result)).backward(**options)
            return result

        return call

    return way


def changing(change: Callable[[Any], Any]) -> Way:
    """Change what the program returns in place, then go backward from it."""

    def way(program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = program(*args, **kwargs)
            change(result)
            loss_of(result).backward()
            return result

        return call

    return way


def differentiated(**options: Any) -> Way:
    """Ask `torch.autograd.grad` for the gradients of the arguments; return them too."""

    def way(program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = program(*args)
            wanted = [arg for arg in args if arg.requires_grad]
            return result, torch.autograd.grad(loss_of(result), wanted, **options)

        return call

    return way


def optimized(make: Callable[[Any], torch.optim.Optimizer]) -> Way:
    """Follow the backward pass with a step of an optimizer over the program's parameters."""

    def way(program: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            optimizer = make(program.parameters())
            result = program(*args)
            optimizer.zero_grad()
            loss_of(result).backward()
            optimizer.step()
            return result

        return call

    return way


class StateOf:
    """What an optimizer keeps, in the order of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __len__(self) -> int:
        return len(self._optimizer.state)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._optimizer.state_dict()["state"].values())
