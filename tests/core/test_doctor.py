"""The doctor says what works here, and survives every patient."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

import torchbay
from torchbay.cli import main
from torchbay.cli._remedies import known_remedy

pytestmark = pytest.mark.slow

SEGFAULT = "import ctypes; ctypes.string_at(0)"


class Ward:
    """Runs the doctor with nothing installed but what is on the shelf."""

    def __init__(self, shelf, patch) -> None:
        self.shelf = shelf
        self.patch = patch

    def run(self, *arguments, **variables):
        for name, value in variables.items():
            self.patch.setenv(name, value)
        self.patch.setenv("PYTHONPATH", str(self.shelf.folder))
        mine = {path.stem.removeprefix("plugin_") for path in self.shelf.folder.glob("plugin_*.py")}
        others = {one.name for one in torchbay.backends()} - mine
        self.patch.setenv("TORCHBAY_SKIP_BACKENDS", ",".join(others))
        return CliRunner().invoke(main, ["doctor", *arguments])

    def examine(self, *arguments, **variables):
        """Return the document and each backend's first check."""
        result = self.run("--json", *arguments, **variables)
        document = json.loads(result.stdout)
        assert result.exit_code == (0 if document["ok"] else 1)
        return document, {one["name"]: one["checks"][0] for one in document["backends"]}


@pytest.fixture
def ward(shelf, monkeypatch, tmp_path_factory):
    """Yield a ward; whatever happens there, no plugin is imported here, and no file is left."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    modules = set(sys.modules)
    yield Ward(shelf, monkeypatch)
    assert [name for name in set(sys.modules) - modules if name.startswith("plugin_")] == []
    assert list(folder.iterdir()) == []


def test_says_what_works_and_on_what(ward):
    ward.shelf.publish("fine", distribution="Vendor", version="3.1")
    document, checks = ward.examine(TORCHBAY_OFF="1")
    assert document["ok"]
    assert checks["fine"]["state"] == "works"
    assert 0 < checks["fine"]["seconds"] < 100
    [backend] = document["backends"]
    assert (backend["distribution"], backend["version"]) == ("Vendor", "3.1")
    assert (backend["api_version"], backend["claims"]) == (1, ["cpu"])
    machine = document["machine"]
    assert machine["devices"][0] == "cpu"
    assert {"torchbay", "plugin_api", "python", "torch", "cuda", "triton", "gpus"} == set(
        machine["versions"]
    )


def test_survives_what_kills_or_stops_a_process(ward):
    ward.shelf.publish("segfaults", ward.shelf.source("segfaults", body=SEGFAULT))
    ward.shelf.publish("exits", "import os; os._exit(0)")
    ward.shelf.publish("hangs", ward.shelf.source("hangs", body="import time; time.sleep(600)"))
    ward.shelf.publish(
        "lingers",
        "import atexit, os; atexit.register(os._exit, 7)\n" + ward.shelf.source("lingers"),
    )
    _, checks = ward.examine("--timeout", "20")
    assert {check["state"] for check in checks.values()} == {"fails"}
    assert checks["segfaults"]["what"] == "the process died of SIGSEGV while compiling"
    assert "Fatal Python error: Segmentation fault" in checks["segfaults"]["output"]
    assert checks["exits"]["what"].endswith("ended with exit status 0 while importing its plugin")
    assert "hung while compiling, and was killed after 20 s" in checks["hangs"]["what"]
    assert checks["lingers"]["what"].endswith("exit status 7 while shutting down")
    assert "authors of torchbay-segfaults" in checks["segfaults"]["remedy"]


def test_tells_causes_apart(ward):
    shelf = ward.shelf
    declining = "from torchbay.plugin import UnsupportedGraph; raise UnsupportedGraph('no kernel')"
    zeros = shelf.source("wrong").replace("return self", "return [0 * x for x in self")
    shelf.publish("wrong", zeros.replace("graph(*inputs)", "graph(*inputs)]"))
    shelf.publish("absent", "import does_not_exist")
    shelf.publish("declines", shelf.source("declines", body=declining))
    shelf.publish("npu", shelf.source("npu").replace("()", "(devices=frozenset({'npu'}))", 1))
    compilerless = "raise RuntimeError('InvalidCxxCompiler: No working C++ compiler found')"
    shelf.publish("needs", shelf.source("needs", body=compilerless))
    shelf.publish("twice", distribution="one")
    shelf.publish("twice", distribution="two")
    document, checks = ward.examine(PATH="")
    assert not document["ok"]
    assert "its result is wrong: " in checks["wrong"]["what"]
    assert "No module named 'does_not_exist'" in checks["absent"]["what"]
    assert checks["absent"]["remedy"].startswith("Repair or reinstall torchbay-absent")
    assert checks["declines"]["state"] == "declines"
    assert "no kernel" in checks["declines"]["what"]
    assert checks["npu"]["state"] == "unclaimed"
    assert "No working C++ compiler" in checks["needs"]["what"]
    assert "Install g++" in checks["needs"]["remedy"]
    assert "claimed by" in checks["twice"]["what"]
    [finding, *_] = document["machine"]["findings"]
    assert finding["what"] == "no C++ compiler was found"
    assert "Install g++" in finding["remedy"]


def test_finds_the_clash_of_two_standard_libraries_by_trying_its_remedy(ward):
    body = f"import os; 'LD_PRELOAD' in os.environ or exec({SEGFAULT!r}); "
    source = ward.shelf.source("clashes", body=body + "return Executable(request.graph)")
    ward.shelf.publish("clashes", source)
    ward.patch.delenv("LD_PRELOAD", raising=False)
    document, checks = ward.examine()
    if document["machine"]["compiler"] is None:
        pytest.skip("no C++ compiler")
    assert checks["clashes"]["state"] == "fails"
    assert "LD_PRELOAD=/" in checks["clashes"]["remedy"]
    assert "libstdc++.so.6, with which it works here" in checks["clashes"]["remedy"]


def test_prints_80_columns_and_a_remedy_for_each_failure(ward):
    ward.shelf.publish("fine")
    ward.shelf.publish("absent", "import does_not_exist")
    result = ward.run(COLUMNS="80")
    assert result.exit_code == 1
    assert max(map(len, result.stdout.splitlines())) <= 80
    lines = result.stdout.splitlines()
    assert any("fine" in line and "torchbay-fine 1.0" in line and "works" in line for line in lines)
    assert any("absent" in line and "fails" in line for line in lines)
    assert "absent on cpu: its plugin plugin_absent failed to import" in result.stdout
    assert "Repair or reinstall torchbay-absent" in result.stdout
    assert "Checking fine on cpu" in result.stderr


def test_survives_a_pytorch_that_cannot_be_imported(ward):
    (ward.shelf.folder / "torch.py").write_text("raise ImportError('libtorch is damaged')")
    ward.shelf.publish("fine")
    document, checks = ward.examine()
    assert not document["ok"]
    assert checks == {}
    [finding] = document["machine"]["findings"]
    assert "libtorch is damaged" in finding["what"]
    assert "Reinstall torch" in finding["remedy"]


def test_says_that_nothing_is_installed(ward, monkeypatch):
    monkeypatch.setattr(torchbay, "backends", list)
    result = ward.run()
    assert result.exit_code == 0
    assert "No backend is installed" in result.stdout


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Python.h: No such file or directory", "Python's headers"),
        ("collect2: fatal error: cannot find 'ld'", "binutils"),
        ("TritonMissing: Cannot find a working triton installation", "pip install triton"),
        ("CUDA error: no kernel image is available for execution", "built for this GPU"),
        ("CUDA driver version is insufficient for CUDA runtime version", "NVIDIA driver"),
        ("the process died of SIGKILL while compiling", "Free memory"),
        ("OSError: [Errno 28] No space left on device", "TMPDIR"),
    ],
)
def test_knows_what_helps(text, remedy):
    assert remedy in known_remedy(text)


def test_knows_nothing_about_what_it_has_not_seen():
    assert known_remedy("ZeroDivisionError: division by zero") is None
