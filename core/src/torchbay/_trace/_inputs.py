"""The inputs of a graph, and the fakes that stand for them while a call is traced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from torchbay._call import Call, Item, is_usable
from torchbay._observe import GradientPlace, Observation, Reading
from torchbay._reason import CannotServe
from torchbay._structure import is_plain, shown_key
from torchbay._symbolic import Declarations, Symbolic
from torchbay._torch_autograd import anchored
from torchbay._torch_dims import declare, declaring, tie
from torchbay._torch_symbols import fake_of, symbolic_int

__all__ = ["Input", "Inputs"]


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
    if isinstance(place, Reading):
        return f"{id(place.holder)} {shown_key(place.key)}"
    return place.access


@attrs.frozen(eq=False)
class Inputs:
    """What a graph takes.

    Attributes:
        tensors: The tensors: state first, then the call's.
        numbers: The numbers that follow them.
        fakes: What stands for each tensor.
        open_numbers: What stands for each number: a symbol for an int, a tensor for a float.
        sizes: What stands for every size and open number, as declarations name them.
    """

    tensors: tuple[Input, ...]
    numbers: tuple[Item | Reading, ...]
    fakes: tuple[torch.Tensor, ...]
    open_numbers: tuple[Any, ...]
    sizes: Mapping[tuple[str, int], Any]

    @classmethod
    def of(cls, call: Call, observation: Observation, symbolic: Symbolic, mode: Any) -> Inputs:
        """Find the inputs of a call, and make fakes of them in a mode.

        Raises:
            CannotServe: One of them cannot be an input.
        """
        tensors = _tensors_of(call, observation)
        numbers: tuple[Item | Reading, ...]
        counted = _counted_numbers(observation, symbolic)
        others = [reading for reading in observation.settings if reading not in counted]
        numbers = (*_open_numbers([*call.numbers, *others], symbolic), *counted)
        with declaring(mode.shape_env):
            fakes = [_fake(mode, entry, f"t{i}", symbolic) for i, entry in enumerate(tensors)]
            open_numbers = [
                _fake_number(mode, n.value, f"t{i}") for i, n in enumerate(numbers, len(tensors))
            ]
        sizes = _sizes(tensors, fakes, numbers, open_numbers)
        _declare(symbolic.declared, sizes)
        return cls(tuple(tensors), numbers, tuple(fakes), tuple(open_numbers), sizes)

    @property
    def all_fakes(self) -> tuple[Any, ...]:
        """What stands for tensors and numbers, in order."""
        return (*self.fakes, *self.open_numbers)

    @property
    def paths(self) -> list[str]:
        """The paths of the tensors."""
        return [entry.path for entry in self.tensors]

    @property
    def by_tensor(self) -> dict[int, torch.Tensor]:
        """The fake of each tensor, by the tensor's identity."""
        pairs = zip(self.tensors, self.fakes, strict=True)
        return {id(entry.tensor): fake for entry, fake in pairs}

    @property
    def positions(self) -> dict[int, int]:
        """The position of each tensor, by its identity and by that of its fake."""
        found = {id(entry.tensor): i for i, entry in enumerate(self.tensors)}
        return found | {id(fake): i for i, fake in enumerate(self.fakes)}


def _tensors_of(call: Call, observation: Observation) -> list[Input]:
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


def _open_numbers(
    numbers: Sequence[Item | Reading], symbolic: Symbolic
) -> tuple[Item | Reading, ...]:
    """Return the numbers that become inputs: symbols cannot stand for NaN or infinity."""
    return tuple(
        place for place in numbers if place.path in symbolic.numbers and math.isfinite(place.value)
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
