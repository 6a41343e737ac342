"""Second stage: the same call again under fake tensors gives the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy

from torchbay._call import Call, Item, Place, is_usable
from torchbay._observe import (
    Gate,
    Observation,
    Reach,
    Reading,
    Snapshot,
    python_randomness_kept,
)
from torchbay._reason import CannotServe, Reason
from torchbay._source import Names, is_user_file
from torchbay._structure import tensors_in
from torchbay._torch_compat import (
    compiler_flag,
    fake_tensor_mode,
    fake_tolist,
    operators_called_directly,
    storage_id,
    to_fake,
    trace_to_graph,
)
from torchbay._trace._agreement import check_agreement
from torchbay._trace._branches import refuse_captured
from torchbay._trace._hidden_writes import reveal_hidden_writes
from torchbay._trace._modes import GateAnswers, OpTracer, Substitution
from torchbay._trace._result import ResultReader

__all__ = ["Input", "Trace", "refuse_captured", "subclass_among", "trace"]

_RESERVED = (
    "inputs",
    "args",
    "kwargs",
    "out",
    "raw",
    "remake",
    "execute",
    "gates",
    "refuses",
    "run",
    "MISS",
)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@attrs.frozen(eq=False)
class Input:
    """One input of the graph: a tensor, and every place the program has it from."""

    tensor: torch.Tensor
    places: tuple[Item | Reading, ...]
    is_state: bool

    @property
    def path(self) -> str:
        """How a user would write it."""
        return self.places[0].path


@attrs.frozen(eq=False)
class Trace:
    """A graph over flat inputs, and how it relates to the call.

    Attributes:
        graph: In-place operators and all. Its outputs are the new tensors of the result, then
            the tensors of the gates.
        inputs: State first, then the call's tensors.
        result: An expression over ``out``, ``inputs`` and ``args`` that makes the result.
        result_count: How many of the outputs belong to the result.
        gates: What Python read of tensor data, in order.
        gate_widths: How many outputs each gate reads.
        is_inference: Whether the program made its result in an inference mode of its own.
        fake_mode: The mode that made the fakes in the graph.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[Input, ...]
    fakes: tuple[torch.Tensor, ...]
    result: str
    result_count: int
    gates: tuple[Gate, ...]
    gate_widths: tuple[int, ...]
    is_inference: bool
    fake_mode: Any
    names: Names


def trace(call: Call, observation: Observation) -> Trace:
    """Trace an observed call.

    Raises:
        CannotServe: The call cannot be in a graph, or its two runs differ.
    """
    inputs = _inputs_of(call, observation)
    mode = fake_tensor_mode()
    fakes = [to_fake(mode, entry.tensor) for entry in inputs]
    positions = {id(entry.tensor): i for i, entry in enumerate(inputs)}
    positions |= {id(fake): i for i, fake in enumerate(fakes)}
    by_tensor = {id(entry.tensor): fake for entry, fake in zip(inputs, fakes, strict=True)}
    answers = GateAnswers(observation.gates)
    tracer = OpTracer(by_tensor, answers)
    names = Names(*_RESERVED, *call.names.values)
    names.values |= call.names.values
    result = ResultReader(call, positions, names)
    source = ""

    def flat(*_: torch.Tensor) -> list[torch.Tensor]:
        nonlocal source
        args, kwargs = call.around(_distinct(call, by_tensor))
        substitution, direct = Substitution(by_tensor, answers), operators_called_directly(_call)
        with direct, tracer, substitution, fake_tolist(answers.tolist):
            value = call.function(*args, **kwargs)
        source = result.expression(observation.result, value)
        return [*result.tensors, *(tensor for read in answers.tensors for tensor in read)]

    graph = _traced(flat, fakes, mode, Snapshot(observation.reach))
    refuse_captured(graph)
    reveal_hidden_writes(graph)
    answers.check_used_up()
    check_agreement(observation.ops, tracer.ops)
    return Trace(
        graph,
        tuple(inputs),
        tuple(fakes),
        source,
        len(result.tensors),
        observation.gates,
        tuple(len(read) for read in answers.tensors),
        _is_inference(observation.result, inputs),
        mode,
        names,
    )


def _call(function: Callable[..., Any], args: tuple[Any, ...], _original: Any) -> Any:
    return function(*args)


def _traced(
    flat: Any, fakes: list[torch.Tensor], mode: Any, snapshot: Snapshot
) -> torch.fx.GraphModule:
    """Trace, and put Python state back: a fake tensor must not stay in a user's object."""
    try:
        with compiler_flag(), python_randomness_kept(), mode:
            return trace_to_graph(flat, fakes)
    except CannotServe:
        raise
    except Exception as error:
        raise CannotServe(f"tracing raised {_brief(error)}", where=_line_of(error)) from error
    finally:
        snapshot.restore()


def _inputs_of(call: Call, observation: Observation) -> list[Input]:
    readings = (r for r in observation.readings if isinstance(r.value, torch.Tensor))
    # One that cannot be used is met, if it is used, as a tensor of unknown origin.
    state = [reading for reading in readings if is_usable(reading.value)]
    places: dict[int, list[Item | Reading]] = {}
    found: list[Item | Reading] = [*state, *call.tensors]
    for place in found:
        places.setdefault(id(place.value), []).append(place)
    return [
        Input(group[0].value, tuple(group), isinstance(group[0], Reading))
        for group in places.values()
    ]


def subclass_among(call: Call, reach: Reach) -> Reason | None:
    """Return which tensor is of a class whose operators are not PyTorch's own, if any is."""
    places: list[Place] = [*call.tensors, *reach.tensors()]
    for place in places:
        if type(place.value) not in _PLAIN_TENSORS and not is_lazy(place.value):
            kind = f"{type(place.value).__module__}.{type(place.value).__qualname__}"
            return Reason(f"{place.path} is a tensor subclass, {kind}")
    return None


def _is_inference(result: Any, inputs: Sequence[Input]) -> bool:
    """Whether the new tensors of a result were made in inference mode, and the call was not.

    Raises:
        CannotServe: Some were, some were not.
    """
    # A view of an input is like the input, wherever it was made.
    known = {storage_id(entry.tensor) for entry in inputs}
    made = {t.is_inference() for t in tensors_in(result) if storage_id(t) not in known}
    if len(made) > 1:
        raise CannotServe("its result holds tensors made in inference mode and others")
    return True in made and not torch.is_inference_mode_enabled()


def _distinct(call: Call, by_tensor: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the fakes of the call's tensors, each once, in the order of the call."""
    return [by_tensor[key] for key in dict.fromkeys(id(item.value) for item in call.tensors)]


def _brief(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _line_of(error: Exception) -> str:
    return next(
        (f"{name}:{line}" for name, line in reversed(list(_frames(error))) if is_user_file(name)),
        "",
    )


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
