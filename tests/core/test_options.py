"""Modes and options are refused before any work, naming what is known."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import Literal

import attrs
import pytest

from torchbay import errors
from torchbay._options import read
from torchbay.plugin import NoOptions


@attrs.frozen(kw_only=True)
class Tuned:
    mode: Literal["default", "max-autotune"] | None = None
    unroll: int = 4
    fast: bool = False
    tolerance: float = 0.5
    target: str = "native"
    sizes: tuple[int, ...] = attrs.field(default=(), converter=tuple)
    _seed: int = 0


class Handmade:
    def __init__(self, *, level: int = 0) -> None:
        if level > 3:
            raise ValueError("levels end at 3")
        self.level = level


def backend(options):
    return SimpleNamespace(name="tuned", options=options)


def test_reads_nothing_as_the_defaults():
    assert read(backend(Tuned), None, None) == Tuned()
    assert read(backend(NoOptions), None, {}) == NoOptions()


def test_reads_a_mode_as_an_option():
    assert read(backend(Tuned), "max-autotune", None).mode == "max-autotune"


def test_reads_any_mapping():
    assert read(backend(Tuned), None, MappingProxyType({"unroll": 8})).unroll == 8


def test_refuses_mode_together_with_options():
    with pytest.raises(errors.InvalidArgument, match="both passed"):
        read(backend(Tuned), "default", {"unroll": 2})


@pytest.mark.parametrize("options", [["unroll"], "unroll", 3, {1: 2}])
def test_refuses_options_that_are_no_mapping_of_names(options):
    with pytest.raises(errors.InvalidArgument, match="map names to values"):
        read(backend(Tuned), None, options)


@pytest.mark.parametrize("mode", [3, True, ["default"]])
def test_refuses_a_mode_that_is_no_string(mode):
    with pytest.raises(errors.InvalidArgument, match="must be a string"):
        read(backend(Tuned), mode, None)


def test_names_the_known_options_and_near_misses():
    with pytest.raises(errors.UnknownOption) as caught:
        read(backend(Tuned), None, {"unrol": 2})
    assert "'unrol'" in caught.value.what
    assert "'tuned'" in caught.value.account
    assert "Did you mean 'unroll'?" in caught.value.remedy
    assert "fast, mode, seed, sizes, target, tolerance, unroll" in caught.value.remedy


def test_says_that_a_backend_has_no_modes():
    with pytest.raises(errors.UnknownOption, match="backend 'tuned' has no modes"):
        read(backend(NoOptions), "default", None)


def test_says_that_a_backend_has_no_options():
    with pytest.raises(errors.UnknownOption, match="backend 'tuned' has no options"):
        read(backend(NoOptions), None, {"unroll": 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unroll", 2),
        ("seed", 7),
        ("fast", True),
        ("tolerance", 1),
        ("tolerance", 0.25),
        ("target", "sm_90"),
        ("mode", None),
        ("mode", "default"),
        ("sizes", [1, 2]),
    ],
)
def test_takes_a_value_of_the_annotated_type(name, value):
    assert isinstance(read(backend(Tuned), None, {name: value}), Tuned)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("unroll", "2", "int"),
        ("unroll", True, "int"),
        ("unroll", 2.0, "int"),
        ("seed", "7", "int"),
        ("fast", 1, "bool"),
        ("tolerance", "0.1", "float"),
        ("tolerance", False, "float"),
        ("target", None, "str"),
        ("mode", "fastest", "'default' or 'max-autotune' or None"),
    ],
)
def test_refuses_a_value_of_another_type(name, value, expected):
    with pytest.raises(errors.UnknownOption) as caught:
        read(backend(Tuned), None, {name: value})
    assert f"option '{name}' takes {expected}, not {value!r}" in str(caught.value)
    assert caught.value.account
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("options", "cause"), [({"level": 9}, ValueError), ({"depth": 1}, TypeError)]
)
def test_passes_on_what_the_options_class_refuses(options, cause):
    with pytest.raises(errors.UnknownOption) as caught:
        read(backend(Handmade), None, options)
    assert isinstance(caught.value.__cause__, cause)
    assert repr(caught.value.__cause__) in caught.value.what
    assert caught.value.account
    assert caught.value.remedy
