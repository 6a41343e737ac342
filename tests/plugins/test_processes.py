"""What the plugins promise about processes: lazy imports and stable fingerprints."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

NAMES = ["eager", "inductor_triton", "aoti"]

IMPORTS = """
import json, sys
from importlib.metadata import entry_points

backends = {e.name: e.load().torchbay_make_backend()
            for e in entry_points(group="torchbay.backends") if e.name in NAMES}
print(json.dumps([name for name in HEAVY if name in sys.modules]))
print(json.dumps({name: dict(b.fingerprint()) for name, b in backends.items()}))
"""


def in_fresh_process() -> list[str]:
    heavy = ["torch._dynamo", "torch._inductor", "triton"]
    program = f"NAMES, HEAVY = {NAMES}, {heavy}\n{IMPORTS}"
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def two_processes() -> list[list[str]]:
    return [in_fresh_process(), in_fresh_process()]


def test_a_backend_imports_no_compiler_before_it_compiles(two_processes):
    assert [json.loads(heavy) for heavy, _ in two_processes] == [[], []]


def test_fingerprints_agree_between_processes(two_processes):
    [(_, one), (_, other)] = two_processes
    assert json.loads(one) == json.loads(other)
    assert set(json.loads(one)) == set(NAMES)


def test_fingerprints_are_strings_without_paths(two_processes):
    for components in json.loads(two_processes[0][1]).values():
        assert components
        for text in components.values():
            assert isinstance(text, str)
            assert "/" not in text


@pytest.mark.parametrize("name", ["inductor_triton", "aoti"])
def test_fingerprint_follows_settings_made_elsewhere(name):
    from torch._inductor import config

    [entry] = entry_points(group="torchbay.backends", name=name)
    backend = entry.load().torchbay_make_backend()
    before = backend.fingerprint()
    with config.patch(epilogue_fusion=not config.epilogue_fusion):
        after = backend.fingerprint()
    changed = {key for key, text in after.items() if before[key] != text}
    assert changed == {"settings"}
