"""Checkpoints while a call is traced: plain calls, whose operators are marked to be run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchbay._control_flow import is_control_flow
from torchbay._observe import BATCH_NORMS, GATES, LIFTS, Observation, Snapshot
from torchbay._reason import CannotServe
from torchbay._source import user_line
from torchbay._structure import is_plain
from torchbay._torch_checkpoint import (
    Around,
    CheckpointPolicy,
    region,
    replays_context,
    view_of,
)
from torchbay._torch_compat import (
    ObservingDispatchMode,
    draws,
    storage_id,
    tensors_among,
    writes_of,
)

__all__ = ["Checkpoints"]


class Checkpoints:
    """Runs the functions of checkpoints plainly, and sees that running them again is the same.

    A checkpoint inside another one belongs to that one.
    """

    def __init__(self, observation: Observation) -> None:
        self._reach = observation.reach
        self._has_effects = bool(observation.effects)
        self._regions = 0
        self._depth = 0

    def around(
        self,
        _original: Callable[..., Around],
        _function: Any,
        preserves: bool,  # noqa: FBT001 - as torch passes it
        context: Any,
        /,
        *rest: Any,
        **_kwargs: Any,
    ) -> Around:
        """Run around a function that the caller runs.

        Raises:
            CannotServe: The user says in which contexts to run it.
        """
        if not torch.is_grad_enabled():
            yield
        elif replays_context(context):
            raise CannotServe("a checkpoint with a context_fn", where=user_line())
        else:
            # After the determinism check, debug and early_stop.
            with self._region(rest[3:], preserves=preserves):
                yield

    def apply(
        self,
        _original: Callable[..., Any],
        function: Any,
        preserves: bool,  # noqa: FBT001 - as torch passes it
        *args: Any,
    ) -> Any:
        """Run a function; gradients go to the tensors it is given, if any of them needs one."""
        if not any(map(_needs_gradient, args)):
            with torch.no_grad():
                return function(*args)
        with self._region(args, preserves=preserves):
            result = function(*(view_of(a) if _needs_gradient(a) else a for a in args))
        _refuse_other_flags(result)
        return result

    @contextmanager
    def _region(self, args: Sequence[Any], *, preserves: bool) -> Iterator[None]:
        before = Snapshot.of(self._reach) if self._has_effects else None
        devices = {tensor.device for tensor in tensors_among(args)} if preserves else None
        if self._depth == 0:
            self._regions += 1
        self._depth += 1
        try:
            with _Region(self._regions, devices):
                yield
        finally:
            self._depth -= 1
        if before is not None:
            _refuse_effects(before)


class _Region(ObservingDispatchMode):
    """Marks the operators of a checkpoint.

    Refuses what would not be the same when eager runs it again: changes of tensors that were there
    before, and random numbers that are not drawn from a state which the checkpoint preserves.
    """

    def __init__(self, number: int, devices: set[torch.device] | None) -> None:
        """Be around a checkpoint.

        Args:
            number: What the partitioner knows it by.
            devices: The devices, besides the CPU, whose generators it preserves; None for none.
        """
        super().__init__()
        self._number = number
        self._devices = devices
        self._made: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._refuse_writes(func, args, kwargs)
        is_drawing = draws(func, args, kwargs)
        with region(self._number, _policy(func, is_drawing=is_drawing)):
            result = func(*args, **kwargs)
        made = tensors_among(result)
        # What functions given to an operator draw is not seen here.
        if is_drawing or (is_control_flow(func) and self._devices is None):
            self._refuse_unpreserved(made, kwargs)
        given = {storage_id(tensor) for tensor in tensors_among((args, kwargs))}
        self._made.update({storage_id(tensor) for tensor in made} - given)
        return result

    def _refuse_writes(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for tensor in _written(func, args, kwargs):
            if storage_id(tensor) not in self._made:
                raise CannotServe(
                    f"{func} changes a tensor inside a checkpoint that was made outside: eager "
                    "changes it again in its backward",
                    where=user_line(),
                    remedy="Change it outside the checkpoint",
                )

    def _refuse_unpreserved(self, made: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> None:
        devices = {tensor.device for tensor in made if tensor.device.type != "cpu"}
        is_preserved = self._devices is not None and devices <= self._devices
        if not is_preserved or kwargs.get("generator") is not None:
            raise CannotServe(
                "a checkpoint draws random numbers whose generator it does not preserve: eager "
                "draws others in its backward",
                where=user_line(),
                remedy="Pass preserve_rng_state=True, or draw nothing in it",
            )


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    values = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in writes_of(func)
    ]
    if func in BATCH_NORMS and args[5]:
        values += args[3:5]
    return tensors_among(values)


def _policy(func: Any, *, is_drawing: bool) -> CheckpointPolicy | None:
    """Return whether to compute an operator again; None where PyTorch may decide.

    It may for attention without dropout: made to compute that again, it would keep random states.
    """
    tags = getattr(func, "tags", ())
    if is_drawing or any(tag in tags for tag in _READING_DATA):
        return CheckpointPolicy.MUST_SAVE
    is_free = torch.Tag.nondeterministic_seeded in tags or func in GATES or func in LIFTS
    return None if is_free or is_control_flow(func) else CheckpointPolicy.MUST_RECOMPUTE


_READING_DATA = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def _needs_gradient(value: Any) -> bool:
    return torch.is_grad_enabled() and isinstance(value, torch.Tensor) and value.requires_grad


def _refuse_other_flags(result: Any) -> None:
    """Refuse results that need gradients, or need none, where eager says otherwise.

    There every floating point tensor which is returned as it is, or in a tuple, needs gradients,
    and none that is further inside.
    """
    for value in result if isinstance(result, tuple) else (result,):
        is_tensor = isinstance(value, torch.Tensor)
        is_same = value.requires_grad is _is_differentiable(value) if is_tensor else is_plain(value)
        if not is_same:
            raise CannotServe(
                "a checkpoint with use_reentrant=True returns what its gradients do not reach",
                where=user_line(),
                remedy="Pass use_reentrant=False",
            )


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _refuse_effects(before: Snapshot) -> None:
    for effect in before.effects():
        for change in effect.changes:
            raise CannotServe(
                f"a checkpoint changes Python state: {change.path}. Eager changes it again in its "
                "backward"
            )
