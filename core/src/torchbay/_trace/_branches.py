"""The functions given to ``torch.cond`` and its like become graphs of their own.

A function may use tensors of the code around it. In the graph it can use its arguments only, so
those tensors become further operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from torchbay._control_flow import with_subgraphs
from torchbay._observe import BranchWatch, Inside
from torchbay._reason import CannotServe
from torchbay._source import user_line
from torchbay._torch_compat import (
    is_fake,
    map_subgraphs,
    with_operands,
    without_recording,
)

__all__ = ["free_tensors", "lifted", "refuse_captured"]

Around = Callable[[], AbstractContextManager[None]]


def free_tensors(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Mapping[int, Any]
) -> list[torch.Tensor]:
    """Return the fakes that the functions given to an operator use besides their arguments.

    Raises:
        CannotServe: They do what no graph can do.
    """
    watch = BranchWatch(Inside())
    with without_recording(args), watch:
        operator(*args, **kwargs)
    if watch.problem:
        raise CannotServe(f"{operator}: {watch.problem}", where=user_line())
    free = [inputs.get(id(tensor), tensor) for tensor in watch.free.values()]
    return list({id(tensor): tensor for tensor in free}.values())


def lifted(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    free: Sequence[torch.Tensor],
    inputs: dict[int, torch.Tensor],
    around: Around,
) -> tuple[Any, ...]:
    """Return an operator's arguments with more operands, and functions that take those, too.

    Args:
        operator: A kept operator.
        args: What it is called with.
        kwargs: What it is called with, by name.
        free: What becomes further operands.
        inputs: What stands for a tensor of the program, by identity.
        around: Makes the context in which the functions run.
    """

    def taking_more(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            own, more = given[: len(given) - len(free)], given[len(given) - len(free) :]
            with around(), _standing_in(inputs, free, more):
                return function(*own)

        return run

    return with_operands(operator, map_subgraphs(taking_more, args), kwargs, free)


@contextmanager
def _standing_in(
    inputs: dict[int, torch.Tensor], free: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Put what a function is given in the place of the tensors around it."""
    by_outer = {id(outer): inner for outer, inner in zip(free, given, strict=True)}
    before = dict(inputs)
    inputs.update({key: by_outer.get(id(fake), fake) for key, fake in before.items()})
    inputs.update(by_outer)
    try:
        yield
    finally:
        inputs.clear()
        inputs.update(before)


def refuse_captured(module: GraphModule) -> None:
    """Raise CannotServe if a tensor of the call has become a constant of an inner graph."""
    for graph in with_subgraphs(module):
        for node in graph.graph.find_nodes(op="get_attr"):
            if is_fake(getattr(graph, str(node.target), None)):
                raise CannotServe("a function given to an operator uses a tensor around it")
