"""Second stage: the same call again under fake tensors gives the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy

from torchbay._call import Call, Item, Place
from torchbay._observe import Observation, Reach, Reading, python_randomness_kept
from torchbay._reason import CannotServe, Reason
from torchbay._source import Names, is_user_file, user_line
from torchbay._structure import tensors_in
from torchbay._symbolic import Symbolic
from torchbay._torch_autograd import PastInput
from torchbay._torch_compat import compiler_flag, storage_id, trace_to_graph
from torchbay._torch_encoder import padded_encoders
from torchbay._torch_optim import plain_optimizers
from torchbay._torch_symbols import symbolic_kernels, symbolic_mode
from torchbay._trace._agreement import check_agreement
from torchbay._trace._branches import refuse_captured
from torchbay._trace._gates import GateAnswers, TracedGate
from torchbay._trace._hidden_writes import reveal_hidden_writes
from torchbay._trace._inputs import Input, Inputs
from torchbay._trace._joint import Joint, is_sure_of_roots, with_tangents
from torchbay._trace._program import Program

__all__ = [
    "RESERVED",
    "Input",
    "Joint",
    "Trace",
    "TracedGate",
    "refuse_captured",
    "subclass_among",
    "trace",
]

RESERVED = (
    "inputs",
    "args",
    "kwargs",
    "out",
    "raw",
    "roots",
    "remake",
    "attach",
    "backward",
    "spent",
    "execute",
    "fork",
    "leaf",
    "branch",
    "match",
    "refuses",
    "run",
    "refusal",
    "outcome",
    "left",
    "mismatches",
    "math",
    "torch",
    "plain_execution",
    "inference_execution",
    *(f"step_{level}" for level in range(1, 66)),
)
"""Names that the code which runs a graph has for its own."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@attrs.frozen(eq=False)
class Trace:
    """A graph over flat inputs, and how it relates to the call.

    Attributes:
        graph: In-place operators and all. Its outputs are the new tensors and numbers of effects
            and of the result, then what the gates read.
        inputs: State first, then the call's tensors.
        numbers: The numbers that follow them, given to the call or found in containers that it
            counts in: ints, and floats as 0-dimensional float64 tensors.
        fakes: What stood for each of them in the trace; a symbol for an int.
        result: An expression over ``out``, ``inputs`` and ``args`` that makes the result.
        effects: Statements that leave in containers what the call left there.
        result_count: How many of the outputs belong to effects and the result.
        gates: What Python read of tensor data, or decided from it, in order.
        is_inference: Whether the program made its result in an inference mode of its own.
        mode: The mode that made the fakes in the graph; it knows their symbols.
        sizes: What stands for every size and open number, as declarations name them.
        check: Raises CannotServe if more was assumed of numbers than the gates check.
        joint: What else the graph takes and returns if its result needs gradients.
        differentiable: The outputs that need gradients.
        spent: Those of them whose gradients a backward inside the call has used up.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[Input, ...]
    numbers: tuple[Item | Reading, ...]
    fakes: tuple[Any, ...]
    result: str
    effects: tuple[str, ...]
    result_count: int
    gates: tuple[TracedGate, ...]
    is_inference: bool
    mode: Any
    sizes: Mapping[tuple[str, int], Any]
    names: Names
    check: Callable[[Any], None]
    joint: Joint | None = None
    differentiable: frozenset[int] = frozenset()
    spent: frozenset[int] = frozenset()


def trace(
    call: Call, observation: Observation, symbolic: Symbolic, *, asks_each: bool = False
) -> Trace:
    """Trace an observed call.

    Args:
        call: The call.
        observation: What it did.
        symbolic: Which sizes and numbers are left open.
        asks_each: Whether each result is differentiated alone as well.

    Raises:
        CannotServe: The call cannot be in a graph, or its two runs differ.
    """
    answers = GateAnswers(observation.gates, is_symbolic=symbolic.reads)
    mode = symbolic_mode(user_line, answers.decided)
    inputs = Inputs.of(call, observation, symbolic, mode)
    names = Names(*RESERVED, *call.names.values)
    names.values |= call.names.values
    program = Program(call, observation, inputs, answers, names, mode, asks_each=asks_each)
    graph = _traced(program, inputs.all_fakes, mode, observation, symbolic)
    differentiation, epilogue = program.differentiation, program.epilogue
    if (joint := differentiation.joint) is not None:
        graph = with_tangents(graph, joint, program.roots + len(joint.roots))
        if not asks_each and not is_sure_of_roots(graph, joint, len(inputs.all_fakes)):
            return trace(call, observation, symbolic, asks_each=True)
    refuse_captured(graph)
    reveal_hidden_writes(graph)
    answers.check_used_up()
    check_agreement(observation.ops, program.ops)
    return Trace(
        graph,
        inputs.tensors,
        inputs.numbers,
        inputs.all_fakes,
        epilogue.result,
        epilogue.effects,
        program.results,
        tuple(answers.gates),
        _is_inference(observation.made, inputs.tensors),
        mode,
        inputs.sizes,
        names,
        answers.check_nothing_new,
        joint,
        differentiation.differentiable,
        differentiation.spent,
    )


def _traced(
    flat: Any, fakes: Sequence[Any], mode: Any, observation: Observation, symbolic: Symbolic
) -> torch.fx.GraphModule:
    """Trace with Python state as it was, and put it back: no fake tensor stays in an object."""
    try:
        undone, python = observation.undone(), python_randomness_kept()
        kernels = symbolic_kernels() if symbolic.in_python else nullcontext()
        with undone, compiler_flag(), padded_encoders(), plain_optimizers(), python, mode, kernels:
            return trace_to_graph(flat, fakes)
    except CannotServe:
        raise
    except PastInput as error:
        raise CannotServe(
            "a backward goes on past its inputs, to what computed them before the call",
            remedy="Pass a detached tensor, or compute all of it inside",
        ) from error
    except Exception as error:
        raise CannotServe(f"tracing raised {_brief(error)}", where=_line_of(error)) from error


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
