"""The guards: one assumption each, able to print itself as source and to say how it failed."""

from __future__ import annotations

import logging
import math
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Protocol

import attrs
import torch

from torchbay._source import Names
from torchbay._structure import Form, keys_test, same_value, take_apart, value_test
from torchbay._torch_compat import fast_path_enabled, function_mode_count, has_saved_tensor_hooks

__all__ = [
    "CANNOT_LOOK",
    "AmbientGuard",
    "ContainerGuard",
    "DistinctGuard",
    "EnvironmentGuard",
    "FastPathGuard",
    "Guard",
    "IdentityGuard",
    "KeysGuard",
    "LevelGuard",
    "Mismatch",
    "NoOverlapGuard",
    "NumberGuard",
    "ObjectGuard",
    "RelationGuard",
    "SameObjectGuard",
    "ShapeOfCallGuard",
    "SizeGuard",
    "SizesGuard",
    "TensorGuard",
    "TensorKeysGuard",
    "UniqueTensorsGuard",
    "ValueGuard",
    "ambient_values",
    "float_tensor",
    "kind_of",
    "tensor_facts",
]

_MISSING = "missing"

CANNOT_LOOK = (LookupError, AttributeError, TypeError, ValueError, ArithmeticError)
"""What a guard raises when the way to something is gone, or a relation has no meaning."""


@attrs.frozen
class Mismatch:
    """How a guard failed: where, what it was compiled for, what was seen."""

    path: str
    expected: str
    seen: str

    def __str__(self) -> str:
        return f"{self.path}: compiled for {self.expected}, seen {self.seen}"


class Guard(Protocol):
    """An assumption that is checked on every call."""

    @property
    def path(self) -> str:
        """What the assumption is about, as a user would write it."""

    @property
    def expected(self) -> str:
        """What was there when the graph was captured."""

    def source(self, names: Names) -> str:
        """Return an expression that is true while the assumption holds."""

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        """Return how the assumption fails, or None while it holds."""


def kind_of(guard: Guard) -> str:
    """Return what kind of guard it is, in words."""
    name = type(guard).__name__.removesuffix("Guard")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _look(access: str, variables: Mapping[str, Any]) -> tuple[bool, Any]:
    try:
        return True, eval(access, dict(variables))  # noqa: S307 - our own source
    except CANNOT_LOOK:
        return False, None


@attrs.frozen
class ShapeOfCallGuard:
    """How many positional arguments, and which keywords, the call has."""

    positional: int
    keywords: tuple[str, ...]
    path: str = "the call"

    @property
    def expected(self) -> str:
        return self._show(self.positional, self.keywords)

    def source(self, names: Names) -> str:
        del names
        keywords = f"[*kwargs] == {list(self.keywords)}" if self.keywords else "not kwargs"
        return f"len(args) == {self.positional} and {keywords}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        positional, keywords = len(variables["args"]), tuple(variables["kwargs"])
        if (positional, keywords) == (self.positional, self.keywords):
            return None
        return Mismatch(self.path, self.expected, self._show(positional, keywords))

    @staticmethod
    def _show(positional: int, keywords: tuple[str, ...]) -> str:
        named = f" and keywords {', '.join(keywords)}" if keywords else ""
        return f"{positional} positional arguments{named}"


@attrs.frozen
class ContainerGuard:
    """A container is of one class and holds as many things, under the same keys."""

    path: str
    access: str
    form: Form

    @property
    def expected(self) -> str:
        return str(self.form)

    def source(self, names: Names) -> str:
        return self.form.test(self.access, names)

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, value = _look(self.access, variables)
        container = take_apart(value) if found else None
        if container is not None and container.form.is_same(self.form):
            return None
        seen = container.form if container is not None else type(value).__qualname__
        return Mismatch(self.path, self.expected, str(seen) if found else _MISSING)


@attrs.frozen
class ValueGuard:
    """A plain value is what it was, in type and value."""

    path: str
    access: str
    value: Any

    @property
    def expected(self) -> str:
        return repr(self.value)

    def source(self, names: Names) -> str:
        return value_test(self.access, self.value, names)

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(self.access, variables)
        if found and same_value(seen, self.value):
            return None
        return Mismatch(self.path, self.expected, _brief(seen) if found else _MISSING)


@attrs.frozen
class NumberGuard:
    """A number that the graph leaves open is of its type, and no infinity or NaN."""

    path: str
    access: str
    kind: type

    @property
    def expected(self) -> str:
        return f"a finite {self.kind.__name__}"

    def source(self, names: Names) -> str:
        is_kind = f"type({self.access}) is {self.kind.__name__}"
        if self.kind is int:
            return is_kind
        return f"{is_kind} and {names.of(math.isfinite, 'isfinite')}({self.access})"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(self.access, variables)
        if found and type(seen) is self.kind and math.isfinite(seen):  # type: ignore[arg-type]
            return None
        return Mismatch(self.path, self.expected, _brief(seen) if found else _MISSING)


def float_tensor(value: float) -> torch.Tensor:
    """Return a float as a graph takes it: a 0-dimensional tensor of all its digits."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


@attrs.frozen
class RelationGuard:
    """Sizes, strides and numbers that a graph leaves open are related as it relies on.

    Attributes:
        path: What it is about.
        relation: The relation, as a user would write it.
        expression: The same over ``inputs``.
        accesses: How emitted code reaches the inputs it is about, by position.
        where: File and line that relies on it, where known.
    """

    path: str
    relation: str
    expression: str
    accesses: Mapping[int, str]
    where: str

    @classmethod
    def of(cls, expression: str, places: Sequence[tuple[str, str]], where: str) -> RelationGuard:
        """Make a guard of an expression that reaches input 0 as ``L['t0']``.

        Args:
            expression: The expression.
            places: Path and access of each input.
            where: File and line that relies on it, where known.
        """
        used = dict.fromkeys(int(number) for number in _INPUT.findall(expression))
        path = ", ".join(places[number][0] for number in used)
        relation = _INPUT.sub(lambda match: places[int(match[1])][0], expression)
        accesses = {number: places[number][1] for number in used}
        return cls(path, relation, _INPUT.sub(r"inputs[\1]", expression), accesses, where)

    @property
    def expected(self) -> str:
        return f"{self.relation}, which {self.where} relies on" if self.where else self.relation

    def source(self, names: Names) -> str:
        names.values |= _FUNCTIONS
        return f"({self.expression})"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found = {number: _look(access, variables) for number, access in self.accesses.items()}
        inputs = {number: value for number, (_, value) in found.items()}
        try:
            if eval(self.expression, {"inputs": inputs, **_FUNCTIONS}):  # noqa: S307 - our own source
                return None
        except CANNOT_LOOK:
            pass
        seen = ", ".join(_brief(value) for value in inputs.values())
        return Mismatch(self.path, self.expected, seen)


_FUNCTIONS = {"math": math, "torch": torch}
_INPUT = re.compile(r"L\['t(\d+)'\]")


def _brief(value: object) -> str:
    text = repr(value) if not isinstance(value, torch.Tensor) else tensor_facts(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@attrs.frozen(eq=False)
class ObjectGuard:
    """An object is the very one that was there; it is not kept alive."""

    path: str
    access: str
    reference: Callable[[], Any]
    description: str

    @classmethod
    def of(cls, path: str, access: str, value: object) -> ObjectGuard:
        """Guard an object by weak identity where it can be, else by identity."""
        description = _address(value)
        try:
            return cls(path, access, weakref.ref(value), description)
        except TypeError:
            return cls(path, access, lambda: value, description)

    @property
    def expected(self) -> str:
        return self.description

    def source(self, names: Names) -> str:
        return f"{self.access} is {names.of(self.reference, f'{self.path}_ref')}()"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(self.access, variables)
        if found and seen is not None and seen is self.reference():
            return None
        return Mismatch(self.path, self.expected, _address(seen) if found else _MISSING)


@attrs.frozen(eq=False)
class IdentityGuard:
    """A holder that is kept alive anyway still holds the very same object."""

    path: str
    access: str
    value: Any

    @property
    def expected(self) -> str:
        return _address(self.value)

    def source(self, names: Names) -> str:
        return f"{self.access} is {names.of(self.value, self.path)}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(self.access, variables)
        if found and seen is self.value:
            return None
        return Mismatch(self.path, self.expected, _address(seen) if found else _MISSING)


def _address(value: object) -> str:
    return f"{type(value).__qualname__} at {id(value):#x}"


@attrs.frozen
class EnvironmentGuard:
    """An environment variable has the value it had, or is not set either."""

    name: str
    value: str | None

    @property
    def path(self) -> str:
        return f"os.environ[{self.name!r}]"

    @property
    def expected(self) -> str:
        return repr(self.value)

    def source(self, names: Names) -> str:
        # The dict behind os.environ: a tenth of the cost.
        variables = names.of(vars(os.environ)["_data"], "environment")
        expected = None if self.value is None else os.fsencode(self.value)
        return f"{variables}.get({os.fsencode(self.name)!r}) == {expected!r}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        del variables
        seen = os.environ.get(self.name)
        return None if seen == self.value else Mismatch(self.path, self.expected, repr(seen))


@attrs.frozen
class FastPathGuard:
    """PyTorch's transformers are let take their fused path, or are not, as they were."""

    is_enabled: bool = attrs.field(factory=fast_path_enabled)
    path: str = "torch.backends.mha.get_fastpath_enabled()"

    @property
    def expected(self) -> str:
        return repr(self.is_enabled)

    def source(self, names: Names) -> str:
        return f"{names.of(fast_path_enabled, 'fast_path_enabled')}() is {self.is_enabled}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        del variables
        seen = fast_path_enabled()
        is_same = seen is self.is_enabled
        return None if is_same else Mismatch(self.path, self.expected, repr(seen))


@attrs.frozen
class LevelGuard:
    """A logger says as before whether records of a level are made."""

    logger: logging.Logger
    level: int
    is_enabled: bool

    @property
    def path(self) -> str:
        return f"level {logging.getLevelName(self.level)} of logger {self.logger.name}"

    @property
    def expected(self) -> str:
        return _ENABLED[self.is_enabled]

    def source(self, names: Names) -> str:
        logger = names.of(self.logger, f"{self.logger.name}_logger")
        return f"{logger}.isEnabledFor({self.level!r}) is {self.is_enabled}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        del variables
        seen = self.logger.isEnabledFor(self.level)
        is_same = seen is self.is_enabled
        return None if is_same else Mismatch(self.path, self.expected, _ENABLED[seen])


_ENABLED = {True: "enabled", False: "disabled"}


@attrs.frozen(eq=False)
class SizesGuard:
    """Containers hold as many things as they did, so that nothing new is there to be read."""

    containers: tuple[Any, ...]
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    path: str = "containers"

    @classmethod
    def of(cls, named: Sequence[tuple[str, Any]]) -> SizesGuard:
        """Guard the number of elements of each of these containers."""
        containers = tuple(container for _, container in named)
        return cls(containers, tuple(path for path, _ in named), tuple(map(len, containers)))

    @property
    def expected(self) -> str:
        return ", ".join(f"len({p}) == {n}" for p, n in zip(self.paths, self.sizes, strict=True))

    def source(self, names: Names) -> str:
        if not any(self.sizes):
            return f"not any({names.of(self.containers, 'empty_containers')})"
        containers = names.of(self.containers, "containers")
        return f"(*map(len, {containers}),) == {names.of(self.sizes, 'container_sizes')}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        del variables
        for path, size, container in zip(self.paths, self.sizes, self.containers, strict=True):
            if len(container) != size:
                return Mismatch(f"len({path})", str(size), str(len(container)))
        return None


@attrs.frozen
class SizeGuard:
    """A container that must not be kept alive is of its class and holds as many things."""

    path: str
    access: str
    kind: type
    size: int

    @property
    def expected(self) -> str:
        return f"{self.kind.__qualname__} of length {self.size}"

    def source(self, names: Names) -> str:
        kind = names.of(self.kind, self.kind.__name__)
        return f"type({self.access}) is {kind} and len({self.access}) == {self.size}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(self.access, variables)
        if found and isinstance(seen, Sized) and (type(seen), len(seen)) == (self.kind, self.size):
            return None
        shown = (
            f"{type(seen).__qualname__} of length {len(seen)}"
            if isinstance(seen, Sized)
            else _MISSING
        )
        return Mismatch(self.path, self.expected, shown)


@attrs.frozen
class KeysGuard:
    """A mapping has the keys it had, in the order it had them."""

    path: str
    access: str
    keys: tuple[Any, ...]

    @property
    def expected(self) -> str:
        return f"keys {[*self.keys]}"

    def source(self, names: Names) -> str:
        return keys_test(self.access, self.keys, names)

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(f"(*{self.access},)", variables)
        if found and same_value(seen, self.keys):
            return None
        return Mismatch(self.path, self.expected, f"keys {[*seen]}" if found else _MISSING)


@attrs.frozen(eq=False)
class TensorKeysGuard:
    """A mapping has the tensors for keys that it had, in the order it had them.

    Tensors are not kept alive; another guard reaches them by the keys.
    """

    path: str
    access: str
    keys: tuple[int, ...]

    @classmethod
    def of(cls, path: str, access: str, mapping: Mapping[Any, Any]) -> TensorKeysGuard:
        """Guard the keys of a mapping."""
        return cls(path, access, tuple(map(id, mapping)))

    @property
    def expected(self) -> str:
        return f"the same {len(self.keys)} tensors as keys"

    def source(self, names: Names) -> str:
        return f"(*map(id, {self.access}),) == {names.of(self.keys, 'key_ids')}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(f"(*map(id, {self.access}),)", variables)
        if found and seen == self.keys:
            return None
        return Mismatch(self.path, self.expected, "others" if found else _MISSING)


@attrs.frozen(eq=False)
class TensorGuard:
    """A tensor has the metadata of the one it was compiled for.

    All tensors of a specialization are checked in one call; ``source`` is what that call checks
    of this one.
    """

    path: str
    access: str
    facts: str
    is_same: Callable[[Any], bool]

    @property
    def expected(self) -> str:
        return self.facts

    def source(self, names: Names) -> str:
        del names
        return f"is_like({self.access}, {self.facts!r})"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(self.access, variables)
        if found and self.is_same(seen):
            return None
        return Mismatch(self.path, self.expected, _brief(seen) if found else _MISSING)


def tensor_facts(tensor: torch.Tensor, fake: torch.Tensor | None = None) -> str:
    """Return the metadata a tensor guard compares, readable: ``float32[2, 3] on cpu``.

    Sizes that the fake leaves open are shown as ``?``.
    """
    kind = type(tensor).__qualname__
    shape = tensor.shape if fake is None else fake.shape
    sizes = ", ".join(str(size) if isinstance(size, int) else "?" for size in shape)
    parts = [f"{kind} {str(tensor.dtype).removeprefix('torch.')}[{sizes}]"]
    if tensor.layout is torch.strided:
        parts.append(f"strides {list(tensor.stride())}")
    else:
        parts.append(f"layout {tensor.layout}")
    parts.append(f"on {tensor.device}")
    flags = {
        "requires_grad": tensor.requires_grad,
        "made in inference mode": tensor.is_inference(),
        "conjugate": tensor.dtype.is_complex and tensor.is_conj(),
        "negative": tensor.is_neg(),
    }
    return ", ".join([*parts, *(name for name, is_set in flags.items() if is_set)])


@attrs.frozen
class SameObjectGuard:
    """Two places hold one and the same object."""

    path: str
    access: str
    other_path: str
    other_access: str
    kind: str = "tensor"

    @property
    def expected(self) -> str:
        return f"the same {self.kind} as {self.other_path}"

    def source(self, names: Names) -> str:
        del names
        return f"{self.access} is {self.other_access}"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found, seen = _look(self.access, variables)
        _, other = _look(self.other_access, variables)
        if found and seen is other:
            return None
        return Mismatch(self.path, self.expected, f"another {self.kind}")


@attrs.frozen
class DistinctGuard:
    """The containers that the call writes are none of the others it reads or writes."""

    path: str
    written: tuple[str, ...]
    others: tuple[str, ...]
    pinned: frozenset[int]

    @property
    def expected(self) -> str:
        return "a container of its own"

    def source(self, names: Names) -> str:
        check, pinned = names.of(are_distinct, "are_distinct"), names.of(self.pinned, "pinned_ids")
        return f"{check}([{', '.join(self.written)}], [{', '.join(self.others)}], {pinned})"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        groups = (self.written, self.others)
        written, others = ([_look(a, variables)[1] for a in group] for group in groups)
        if are_distinct(written, others, self.pinned):
            return None
        return Mismatch(self.path, self.expected, "one that is met elsewhere too")


def are_distinct(
    written: Sequence[object], others: Sequence[object], pinned: frozenset[int]
) -> bool:
    """Whether each of the written containers is none of the others, nor one known by its id."""
    ids = set(map(id, written))
    is_elsewhere = not ids.isdisjoint(map(id, others)) or not ids.isdisjoint(pinned)
    return len(ids) == len(written) and not is_elsewhere


@attrs.frozen
class UniqueTensorsGuard:
    """No tensor is found in two places but those that hold one tensor anyway."""

    places: tuple[tuple[str, str], ...]

    @property
    def path(self) -> str:
        return ", ".join(path for path, _ in self.places)

    @property
    def expected(self) -> str:
        return "a tensor of its own"

    def source(self, names: Names) -> str:
        del names
        return f"are_alike({', '.join(access for _, access in self.places)})"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        seen: dict[int, str] = {}
        for path, access in self.places:
            found, value = _look(access, variables)
            other = seen.setdefault(id(value), path) if found else path
            if other != path and isinstance(value, torch.Tensor):
                return Mismatch(path, self.expected, f"the same tensor as {other}")
        return None


@attrs.frozen
class NoOverlapGuard:
    """The tensors that the graph changes share no memory with each other or with other inputs."""

    path: str
    written: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def expected(self) -> str:
        return "memory of its own"

    def source(self, names: Names) -> str:
        check = names.of(share_no_memory, "share_no_memory")
        return f"{check}([{', '.join(self.written)}], [{', '.join(self.others)}])"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        found = [[_look(a, variables) for a in group] for group in (self.written, self.others)]
        written, others = ([value for is_there, value in group if is_there] for group in found)
        are_tensors = all(isinstance(value, torch.Tensor) for value in (*written, *others))
        if are_tensors and share_no_memory(written, others):
            return None
        return Mismatch(self.path, self.expected, "memory shared with another input")


def share_no_memory(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether each of the written tensors has a storage that no other tensor here has."""
    storages = [_storage(tensor) for tensor in written if tensor.numel()]
    unique = set(storages)
    return len(unique) == len(storages) and not any(
        _storage(tensor) in unique for tensor in others if tensor.numel()
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def ambient_values() -> dict[str, Any]:
    """Return the ambient state a graph depends on, by the name a user knows it by."""
    values: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "thread count": torch.get_num_threads(),
        "modes over torch's functions": function_mode_count(),
        "hooks on what autograd saves": torch.is_grad_enabled() and has_saved_tensor_hooks(),
    }
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            values[f"autocast on {device}"] = torch.get_autocast_dtype(device)
    return values


@attrs.frozen(eq=False)
class AmbientGuard:
    """Grad and inference mode, autocast, defaults and determinism are as they were."""

    values: Mapping[str, Any] = attrs.field(factory=ambient_values)
    path: str = "ambient state"

    @property
    def expected(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.values.items())

    def source(self, names: Names) -> str:
        del names
        return "ambient_state_is_unchanged()"

    def mismatch(self, variables: Mapping[str, Any]) -> Mismatch | None:
        del variables
        now = ambient_values()
        if now == self.values:
            return None
        changed = [key for key in {**self.values, **now} if self.values.get(key) != now.get(key)]
        expected = ", ".join(f"{key} {self.values.get(key, 'off')}" for key in changed)
        seen = ", ".join(f"{key} {now.get(key, 'off')}" for key in changed)
        return Mismatch(self.path, expected, seen)
