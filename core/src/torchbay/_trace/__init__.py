"""Second stage: the same call again under fake tensors gives the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy

from torchbay._call import Call, Item, Place, is_usable
from torchbay._observe import (
    GradientPlace,
    Observation,
    Reach,
    Reading,
    put,
    python_randomness_kept,
)
from torchbay._reason import CannotServe, Reason
from torchbay._source import Names, is_user_file, user_line
from torchbay._structure import is_plain, tensors_in
from torchbay._symbolic import Declarations, Symbolic
from torchbay._torch_autograd import PastInput, anchored, in_this_thread
from torchbay._torch_compat import (
    compiler_flag,
    fake_tolist,
    fakes_as_tensors,
    operators_called_directly,
    storage_id,
    trace_to_graph,
)
from torchbay._torch_dims import declare, declaring, tie
from torchbay._torch_encoder import padded_encoders
from torchbay._torch_symbols import (
    bind,
    fake_of,
    symbolic_int,
    symbolic_kernels,
    symbolic_mode,
)
from torchbay._trace._agreement import check_agreement
from torchbay._trace._branches import refuse_captured
from torchbay._trace._epilogue import Epilogue
from torchbay._trace._gates import GateAnswers, TracedGate
from torchbay._trace._gradients import GradientWriter
from torchbay._trace._hidden_writes import reveal_hidden_writes
from torchbay._trace._joint import Differentiation, Joint, with_tangents
from torchbay._trace._modes import OpTracer, Substitution
from torchbay._trace._packing import KnownTensors

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
class Input:
    """One input of the graph: a tensor, and every place the program has it from."""

    tensor: torch.Tensor
    places: tuple[Item | Reading | GradientPlace, ...]
    is_state: bool

    @property
    def path(self) -> str:
        """How a user would write it."""
        return self.places[0].path

    @property
    def key(self) -> str:
        """Equal for the same place, whatever inputs there are besides it."""
        return _key(self.places[0])


def _key(place: Item | Reading | GradientPlace) -> str:
    if isinstance(place, GradientPlace):
        return f"{_key(place.owner)}.grad"
    return f"{id(place.holder)} {place.key!r}" if isinstance(place, Reading) else place.access


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


def trace(call: Call, observation: Observation, symbolic: Symbolic) -> Trace:
    """Trace an observed call.

    Raises:
        CannotServe: The call cannot be in a graph, or its two runs differ.
    """
    inputs = _inputs_of(call, observation)
    numbers: tuple[Item | Reading, ...] = _numbers_of(call, symbolic)
    numbers += _counted_numbers(observation, symbolic)
    answers = GateAnswers(observation.gates, is_symbolic=symbolic.reads)
    mode = symbolic_mode(user_line, answers.decided)
    with declaring(mode.shape_env):
        fakes = [_fake(mode, entry, f"t{i}", symbolic) for i, entry in enumerate(inputs)]
        open_numbers = [
            _fake_number(mode, n.value, f"t{i}") for i, n in enumerate(numbers, len(inputs))
        ]
    sizes = _sizes(inputs, fakes, numbers, open_numbers)
    _declare(symbolic.declared, sizes)
    positions = {id(entry.tensor): i for i, entry in enumerate(inputs)}
    positions |= {id(fake): i for i, fake in enumerate(fakes)}
    by_tensor = {id(entry.tensor): fake for entry, fake in zip(inputs, fakes, strict=True)}
    known = KnownTensors()
    tracer = OpTracer(by_tensor, answers, known, observation.ops)
    names = Names(*RESERVED, *call.names.values)
    names.values |= call.names.values
    paths = [entry.path for entry in inputs]
    gradients = GradientWriter(observation, [entry.tensor for entry in inputs], paths, fakes)
    epilogue = Epilogue(call, observation, positions, names, gradients)
    differentiation = Differentiation(observation, paths, fakes)
    outputs = 0

    @contextmanager
    def active() -> Iterator[None]:
        substitution, direct = Substitution(by_tensor, answers, known), operators_called_directly
        tolist = fake_tolist(answers.tolist)
        with in_this_thread(), fakes_as_tensors(), direct(_call), tracer, substitution, tolist:
            yield

    def flat(*given: Any) -> list[Any]:
        nonlocal outputs
        pairs = zip(numbers, given[len(inputs) :], strict=True)
        stand_ins = [(place, _number(number, place.value)) for place, number in pairs]
        given_numbers = {place.path: n for place, n in stand_ins if isinstance(place, Item)}
        args, kwargs = call.around(_distinct(call, by_tensor), given_numbers)
        epilogue.expect(args, kwargs)
        _put_numbers(observation, stand_ins)
        gradients.hold()
        with active():
            value = call.function(*args, **kwargs)
        epilogue.read(value)
        outputs = len(epilogue.tensors)
        with active():
            differentiated = differentiation.outputs(epilogue.tensors, tracer)
        answers.finish(mode, fakes)
        made = map(known.lifted, epilogue.tensors)
        reads = (read for gate in answers.gates for read in gate.reads)
        return [*made, *reads, *differentiated]

    graph = _traced(flat, [*fakes, *open_numbers], mode, observation, symbolic)
    if (joint := differentiation.joint) is not None:
        reads = sum(len(gate.reads) for gate in answers.gates)
        graph = with_tangents(graph, joint, outputs + reads + len(joint.roots))
    refuse_captured(graph)
    reveal_hidden_writes(graph)
    answers.check_used_up()
    check_agreement(observation.ops, tracer.ops)
    return Trace(
        graph,
        tuple(inputs),
        numbers,
        (*fakes, *open_numbers),
        epilogue.result,
        epilogue.effects,
        outputs,
        tuple(answers.gates),
        _is_inference(observation.made, inputs),
        mode,
        sizes,
        names,
        answers.check_nothing_new,
        joint,
        differentiation.differentiable,
        differentiation.spent,
    )


def _call(function: Callable[..., Any], args: tuple[Any, ...], _original: Any) -> Any:
    return function(*args)


def _traced(
    flat: Any, fakes: list[Any], mode: Any, observation: Observation, symbolic: Symbolic
) -> torch.fx.GraphModule:
    """Trace with Python state as it was, and put it back: no fake tensor stays in an object."""
    try:
        undone, python = observation.undone(), python_randomness_kept()
        kernels = symbolic_kernels() if symbolic.in_python else nullcontext()
        with undone, compiler_flag(), padded_encoders(), python, mode, kernels:
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


def _inputs_of(call: Call, observation: Observation) -> list[Input]:
    readings = (r for r in observation.readings if isinstance(r.value, torch.Tensor))
    # One that cannot be used is met, if it is used, as a tensor of unknown origin.
    state = [reading for reading in readings if is_usable(reading.value)]
    given = call.tensors
    found: list[Item | Reading | GradientPlace] = [*state, *_gradients_of(state, observation)]
    state_ids = {id(place.value) for place in found}
    found += [*given, *_gradients_of(given, observation)]
    places: dict[int, list[Item | Reading | GradientPlace]] = {}
    for place in found:
        places.setdefault(id(place.value), []).append(place)
    return [Input(group[0].value, tuple(group), key in state_ids) for key, group in places.items()]


def _gradients_of(
    places: Sequence[Item | Reading], observation: Observation
) -> Iterator[GradientPlace]:
    """Yield the gradients that the call found on these tensors, if it had to do with them.

    Raises:
        CannotServe: One has no strides.
    """
    before = {id(g.tensor): g.before for g in observation.gradients}
    for place in places:
        if (gradient := before.get(id(place.value))) is not None:
            if not is_usable(gradient):
                raise CannotServe(f"{place.path}.grad is sparse, nested or quantized")
            yield GradientPlace(place, gradient)


def _numbers_of(call: Call, symbolic: Symbolic) -> tuple[Item, ...]:
    """Return the numbers of a call that become inputs: symbols cannot stand for NaN or infinity."""
    return tuple(
        item for item in call.numbers if item.path in symbolic.numbers and math.isfinite(item.value)
    )


def _counted_numbers(observation: Observation, symbolic: Symbolic) -> tuple[Reading, ...]:
    """Return the numbers in containers that the call moves: the next call finds others there.

    Raises:
        CannotServe: Numbers cannot be left open.
    """
    found = tuple(r for r in observation.counted if math.isfinite(r.value))
    if observation.counted and not (symbolic.reads and len(found) == len(observation.counted)):
        raise CannotServe(
            f"every call changes Python state: {observation.counted[0].path}, a number",
            remedy="Return the value instead of storing it, or keep it in a tensor",
        )
    return found


def _put_numbers(observation: Observation, stand_ins: Sequence[tuple[Item | Reading, Any]]) -> None:
    """Let containers hold the symbols of their numbers while the call is traced."""
    holders = {id(holder.container): holder for holder in observation.watched}
    for place, number in stand_ins:
        if isinstance(place, Reading):
            put(holders[id(place.holder)], place.key, number)


def _symbolic_dims(entry: Input, symbolic: Symbolic) -> frozenset[int]:
    found = (symbolic.dims.get(place.path, frozenset()) for place in entry.places)
    return frozenset().union(*found)


def _fake(mode: Any, entry: Input, name: str, symbolic: Symbolic) -> torch.Tensor:
    dims, serving_all = _symbolic_dims(entry, symbolic), _dims_serving_all(entry, symbolic)
    has_past = entry.tensor.requires_grad and not entry.tensor.is_leaf
    if has_past and not torch.is_inference_mode_enabled():
        fake = anchored(fake_of(mode, entry.tensor.detach(), name, dims, serving_all))
    else:
        fake = fake_of(mode, entry.tensor, name, dims, serving_all)
    attributes = {key: value for key, value in vars(entry.tensor).items() if is_plain(value)}
    vars(fake).update({**attributes, **vars(fake)})
    return fake


def _dims_serving_all(entry: Input, symbolic: Symbolic) -> frozenset[int]:
    paths = {place.path for place in entry.places}
    said = symbolic.declared.items()
    return frozenset(dim for (path, dim), one in said if path in paths and one.serves_all)


def _sizes(
    inputs: Sequence[Input],
    fakes: Sequence[torch.Tensor],
    numbers: Sequence[Item | Reading],
    open_numbers: Sequence[Any],
) -> dict[tuple[str, int], Any]:
    """Return what stands for every size, and for every open number, as declarations name them."""
    found: dict[tuple[str, int], Any] = {}
    for entry, fake in zip(inputs, fakes, strict=True):
        for place in entry.places:
            found |= {(place.path, dim): size for dim, size in enumerate(fake.shape)}
    named = zip(numbers, open_numbers, strict=True)
    return found | {(item.path, -1): number for item, number in named}


def _declare(declared: Declarations, sizes: Mapping[tuple[str, int], Any]) -> None:
    """Have the symbols be as the caller declared them."""
    given = [(said, sizes[key]) for key, said in declared.items() if key in sizes]
    roots: dict[str, Any] = {}
    for said, size in given:
        declare(size, said.low, said.high, said.hint)
        if said.same and said.derived is None:
            tie(size, roots.setdefault(said.same, size))
    for said, size in given:
        if said.derived is not None:
            tie(size, said.derived(roots[said.same]))


def _fake_number(mode: Any, value: float, name: str) -> Any:
    """Return what stands for a number: a symbol, or a tensor that holds a float."""
    if isinstance(value, int):
        return symbolic_int(mode, value, name)
    return fake_of(mode, torch.tensor(value, dtype=torch.float64), name, frozenset())


def _number(stand_in: Any, value: float) -> Any:
    """Return the symbol of a number, read from the tensor that holds it if it is a float."""
    if isinstance(value, int):
        return stand_in
    number = torch.ops.aten._local_scalar_dense(stand_in)  # noqa: SLF001 - an operator's name
    bind(number, value)
    return number


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
