"""``torchbay conformance`` needs no test file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import torchbay

TORCHBAY = [sys.executable, "-c", "from torchbay.cli import main; main()", "conformance"]


PLUGIN = """
    import os, signal
    from broken_backends import Correct
    from torchbay.plugin import hookimpl

    class Fatal(Correct):
        name = "fatal"

        def compile(self, request):
            os.kill(os.getpid(), signal.SIGSEGV)

    @hookimpl
    def torchbay_make_backend():
        return Fatal()
"""


def run(*arguments, cwd, path=()):
    return subprocess.run(
        [*TORCHBAY, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        check=False,
    )


def install(folder, name, source):
    """Make a module and the metadata of a distribution that brings it as a backend."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torchbay.backends]\n{name} = {name}\n")


def test_runs_the_kit_on_an_installed_backend(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    done = run("eager", "-k", "test_operator and softmax", "--report", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    version = torchbay.__version__
    line = f"torchbay: eager {version}, plugin API 1: 2 passed, 0 refused cleanly, 0 known failures"
    assert line in done.stdout
    [record] = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [result["case"] for result in record["results"]] == ["softmax", "log_softmax"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "pytest.ini"]


def test_passes_the_rest_to_pytest(tmp_path):
    done = run("eager", "--", "--collect-only", cwd=tmp_path)
    assert done.returncode == 0
    assert "test_model[LSTM]" in done.stdout


@pytest.mark.parametrize("name", ["eagre", "nothing_like_it"])
def test_refuses_a_backend_that_is_not_installed(tmp_path, name):
    done = run(name, cwd=tmp_path)
    assert done.returncode == 1
    assert f"no backend is called {name!r}" in done.stderr
    assert "Traceback" not in done.stderr


def test_costs_nothing_until_it_is_used():
    program = "import sys, torchbay; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_survives_a_backend_that_kills_the_process(tmp_path):
    install(tmp_path, "fatal", PLUGIN)
    path = [tmp_path, Path(__file__).parent]
    done = run("fatal", "-k", "test_compiles_a_small_graph", cwd=tmp_path, path=path)
    assert done.returncode == 1
    assert "SIGSEGV ended the process" in done.stderr
