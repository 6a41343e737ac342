"""PyTorch's activation checkpoints, and what its partitioner is told about them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import torch
from torch.fx import Node, traceback
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy

__all__ = [
    "Around",
    "CheckpointPolicy",
    "StandIn",
    "checkpoints_replaced",
    "is_recomputed",
    "keep",
    "region",
    "region_of",
    "replays_context",
    "view_of",
]

Around = Generator[None, None, None]
"""What runs around the function of a checkpoint: it yields once."""


class StandIn(Protocol):
    """What checkpoints do in a thread while they are replaced."""

    def around(
        self,
        original: Callable[..., Around],
        function: Any,
        preserves: bool,  # noqa: FBT001 - as torch passes it
        context: Any,
        /,
        *rest: Any,
        **kwargs: Any,
    ) -> Around:
        """Run around the function of a checkpoint with ``use_reentrant=False``.

        Args:
            original: What runs around it otherwise; takes the other arguments, and keywords.
            function: What it runs to compute again.
            preserves: Whether that draws the same random numbers.
            context: Makes contexts for both runs.
            rest: The determinism check, whether to debug and to stop early; then what the
                function is given.
            kwargs: What it is given besides.
        """
        ...

    def apply(
        self,
        original: Callable[..., Any],
        function: Any,
        preserves: bool,  # noqa: FBT001 - as torch passes it
        *args: Any,
    ) -> Any:
        """Be a checkpoint with ``use_reentrant=True``."""
        ...


_original_around: Any = checkpoint._checkpoint_without_reentrant_generator
_lock = threading.Lock()
_users = 0
_here = threading.local()


@contextlib.contextmanager
def checkpoints_replaced(stand_in: StandIn) -> Iterator[None]:
    """Have the checkpoints that this thread meets go through a stand-in.

    What they go through is replaced once for all threads, counted, and put back when the last user
    leaves.
    """
    with _lock:
        _enter()
    before, _here.stand_in = getattr(_here, "stand_in", None), stand_in
    try:
        yield
    finally:
        _here.stand_in = before
        with _lock:
            _leave()


def _enter() -> None:
    global _users
    if _users == 0:
        checkpoint._checkpoint_without_reentrant_generator = _around  # type: ignore[assignment]
        CheckpointFunction.apply = classmethod(_apply)  # type: ignore[assignment]
    _users += 1


def _leave() -> None:
    global _users
    _users -= 1
    if _users == 0:
        checkpoint._checkpoint_without_reentrant_generator = _original_around
        del CheckpointFunction.apply


def _around(function: Any, *args: Any, **kwargs: Any) -> Around:
    stand_in: StandIn | None = getattr(_here, "stand_in", None)
    around: Around
    if stand_in is None:
        around = _original_around(function, *args, **kwargs)
    else:
        around = stand_in.around(_original_around, function, *args, **kwargs)
    return around


def _apply(cls: Any, *args: Any) -> Any:
    original = super(CheckpointFunction, cls).apply
    stand_in: StandIn | None = getattr(_here, "stand_in", None)
    if stand_in is None or cls is not CheckpointFunction:
        return original(*args)
    return stand_in.apply(original, *args)


def replays_context(context: Any) -> bool:
    """Whether a checkpoint runs its function in contexts that the user gave."""
    return context is not checkpoint.noop_context_fn


@contextlib.contextmanager
def region(number: int, policy: CheckpointPolicy | None) -> Iterator[None]:
    """Have what is traced meanwhile be part of a checkpoint.

    Args:
        number: Which one: they are numbered in the order of the program.
        policy: Whether its backward is to compute it again; None leaves that to the partitioner.
    """
    meta = traceback.current_meta
    meta[_REGION] = number
    if policy is not None:
        meta[_POLICY] = policy
    try:
        yield
    finally:
        for field in (_REGION, _POLICY):
            meta.pop(field, None)


# Fields that torch copies to the nodes which are traced, once again when a graph is traced anew.
_REGION = "ac_graph_id"
_POLICY = "recompute"


def region_of(node: Node) -> int | None:
    """Return the checkpoint that a node belongs to, if it does to any."""
    number: int | None = node.meta.get(_REGION)
    return number


def is_recomputed(node: Node) -> bool:
    """Whether a backward has to compute a node again."""
    return node.meta.get(_POLICY) is CheckpointPolicy.MUST_RECOMPUTE


def keep(node: Node) -> None:
    """Have the partitioner keep what a node computes if the backward needs it."""
    node.meta[_POLICY] = CheckpointPolicy.MUST_SAVE


def view_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of all of a tensor: gradients of its uses are summed before they go on."""
    return tensor.view_as(tensor)
