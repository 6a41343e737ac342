"""Importing torchbay is cheap, quiet, and brings no compiler."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import torchbay

PACKAGE = Path(torchbay.__file__).parent
HEAVY = ("torch._dynamo", "torch._inductor", "triton", "torchbay_")


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(module_name(path) for path in PACKAGE.rglob("*.py"))


def run(program, *arguments, warnings="error"):
    """Run a program in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", dedent(program), *arguments],
        env={**os.environ, "TORCHBAY_LOG": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Importing torch takes a second, so each module gets a fork of one interpreter that has it.
ALONE = """
    import importlib, os, sys, traceback, warnings
    import torch

    for name in sys.argv[1:]:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            warnings.simplefilter("error")
            code = 0
            try:
                importlib.import_module(name)
            except BaseException:
                traceback.print_exc(limit=-1)
                code = 1
            sys.stderr.flush()
            os._exit(code)
        if os.waitpid(child, 0)[1]:
            print(name)
"""


def test_imports_every_module_alone():
    assert run(ALONE, *MODULES, warnings="default") == ""


def test_finds_a_module_that_cannot_be_imported():
    assert run(ALONE, "torchbay.does_not_exist", warnings="default") == "torchbay.does_not_exist\n"


def test_imports_quietly_as_the_first_thing():
    assert run("import torchbay") == ""


def test_imports_no_compiler_and_no_plugin():
    program = """
        import sys, torch
        before = set(sys.modules)
        import torchbay
        print(*sorted(set(sys.modules) - before))
    """
    brought = run(program).split()
    assert "torchbay" in brought
    assert [name for name in brought if name.startswith(HEAVY)] == []


def test_imports_no_compiler_through_torch_either():
    loaded = run("import sys, torchbay; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith(HEAVY)] == []


def test_lists_backends_without_importing_one():
    loaded = run("import sys, torchbay; torchbay.backends(); print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith(HEAVY)] == []


# Each measurement is a fork, so that nothing but torch is imported before it. The first leaves
# bytecode behind for the rest, as an installation does.
COST = """
    import os, sys, time
    import torch

    sys.dont_write_bytecode = False
    sys.pycache_prefix = sys.argv[1]
    for _ in range(8):
        child = os.fork()
        if not child:
            start = time.perf_counter()
            import torchbay
            print((time.perf_counter() - start) * 1000, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
"""


def test_costs_less_than_60_ms_over_torch(tmp_path):
    _, *costs = map(float, run(COST, tmp_path, warnings="default").split())
    assert len(costs) == 7
    assert statistics.median(costs) < 60
