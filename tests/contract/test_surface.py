"""The public doors export what they say, and nothing else."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

import torchbay
from torchbay import errors, plugin

DOORS = [torchbay, errors, plugin]


def named(door):
    return pytest.mark.parametrize("door", door, ids=lambda door: door.__name__)


def defined_in(door):
    """Public names a module binds in its own source, imports apart."""
    for statement in ast.parse(inspect.getsource(door)).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


@named(DOORS)
def test_exports_exist(door):
    missing = [name for name in door.__all__ if not hasattr(door, name)]
    assert missing == []


def rank(name):
    """Constants, then classes, then the rest: the order ruff keeps."""
    return (not name.isupper(), not name[0].isupper(), name)


@named(DOORS)
def test_exports_are_sorted_and_unique(door):
    assert list(door.__all__) == sorted(set(door.__all__), key=rank)


@named([errors, plugin])
def test_exports_what_it_defines(door):
    public = {name for name in defined_in(door) if not name.startswith("_")}
    assert public - set(door.__all__) == set()


@named(DOORS)
def test_dir_shows_the_exports(door):
    assert set(door.__all__) <= set(dir(door))


def test_classes_live_in_a_torchbay_module():
    for door in DOORS:
        for name in door.__all__:
            value = getattr(door, name)
            if inspect.isclass(value):
                assert value.__module__.split(".")[0] == "torchbay", name


@named(DOORS)
def test_every_export_states_its_promise(door):
    for name in door.__all__:
        value = getattr(door, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), name


def test_the_version_is_the_distributions():
    from importlib.metadata import version

    assert torchbay.__version__ == version("torchbay")


def drawn_tree():
    """Error name -> name of its parent, from the drawing in the docstring."""
    path, tree = [], {}
    for line in errors.__doc__.splitlines():
        if found := re.match(r"^( *)[*x+-] (\w+)", line):
            depth = len(found[1]) // 2
            path[depth:] = [found[2]]
            tree[found[2]] = path[depth - 1] if depth else "Exception"
    return tree


def test_draws_every_error_under_its_parent():
    real = {
        name: getattr(errors, name).__mro__[1].__name__
        for name in errors.__all__
        if issubclass(getattr(errors, name), errors.TorchbayError)
    }
    assert drawn_tree() == real


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "TorchbayWarning"])
def test_an_error_has_three_parts(name):
    error = getattr(errors, name)("it broke", account="backend 'x' from y 1.0", remedy="Mend it.")
    assert (error.what, error.account, error.remedy) == error.args
    assert str(error) == "it broke (backend 'x' from y 1.0). Mend it."
