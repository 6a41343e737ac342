"""What went wrong with other projects' plugins, tried on ours through the public doors."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from textwrap import dedent

import pytest
import torch

import torchbay
from torchbay import errors
from torchbay.plugin import API_VERSION, OLDEST_API_VERSION


def double(x):
    return x + x


def listing(name):
    return next(one for one in torchbay.backends() if one.name == name)


def call(backend, **settings):
    """Compile and call twice: the first call is the one a graph is captured from."""
    compiled = torchbay.compile(double, backend=backend, fullgraph=True, **settings)
    compiled(torch.ones(3))
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    return compiled


def run(program, shelf):
    """Run a program in a fresh process that finds what is on the shelf."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(program)],
        env={**os.environ, "PYTHONPATH": str(shelf.folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# https://github.com/vllm-project/vllm/issues/48277
def test_says_which_distribution_raised_when_it_was_asked_for_by_name(shelf):
    shelf.publish("mygpu", "raise OSError('no driver')", distribution="Vendor-GPU", version="3.1")
    for _ in range(2):
        with pytest.raises(errors.BackendBroken) as caught:
            call("mygpu")
        assert "OSError('no driver')" in caught.value.what
        assert caught.value.account == "backend 'mygpu' from Vendor-GPU 3.1"
        assert isinstance(caught.value.__cause__, OSError)
    assert call("eager")


# https://github.com/vllm-project/vllm/pull/43987
@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ("mygpy", "Did you mean 'mygpu'?"),
        ("openxla", "torchbay.backends() lists what is installed"),
        ("eager_", "Did you mean 'eager'?"),
    ],
)
def test_says_what_is_installed_when_the_backend_is_not(shelf, asked, remedy):
    module = shelf.publish("mygpu")
    with pytest.raises(errors.UnknownBackend, match=f"no backend is called '{asked}'") as caught:
        torchbay.compile(double, backend=asked)
    installed = re.search("installed: (.*)", caught.value.what)[1].split(", ")
    assert {"eager", "mygpu"} <= set(installed)
    assert caught.value.remedy.startswith(remedy)
    assert module not in sys.modules


# https://github.com/vllm-project/vllm/pull/43987
def test_says_how_to_install_a_backend_it_knows(shelf):
    program = """
        import importlib.metadata, json
        importlib.metadata.entry_points = lambda group: []
        import torchbay
        try:
            torchbay.set_default_backend("aoti")
        except torchbay.errors.UnknownBackend as error:
            print(json.dumps(str(error)))
    """
    assert "torchbay-aoti provides it: pip install torchbay-aoti" in run(program, shelf)


# https://github.com/jax-ml/jax/issues/24901 and https://github.com/pytorch/xla/issues/6949
@pytest.mark.parametrize("version", [OLDEST_API_VERSION - 1, API_VERSION + 1])
def test_refuses_a_plugin_of_another_api_with_both_numbers(shelf, version):
    shelf.publish("other", shelf.source("other", version=version))
    with pytest.raises(errors.BackendOutdated) as caught:
        call("other")
    assert re.search(rf"plugin API {version};.* speaks .*{API_VERSION}", caught.value.what)
    assert "torchbay-other 1.0" in caught.value.account
    assert listing("other").state == "broken"
    assert call("eager")


# https://github.com/simonw/llm/pull/1351 and https://github.com/conda/conda/pull/12460
def test_serves_with_the_good_plugin_beside_a_broken_one(shelf):
    shelf.publish("good")
    shelf.publish("bad", "import does_not_exist")
    with pytest.raises(errors.BackendBroken, match="does_not_exist"):
        call("bad")
    compiled = call("good")
    assert torchbay.explain(compiled).specializations[0].backend == "good"
    assert (listing("bad").state, listing("good").state) == ("broken", "loaded")
    assert "does_not_exist" in str(listing("bad").error)


# https://github.com/simonw/llm/pull/1351 and https://github.com/conda/conda/pull/12460
@pytest.mark.parametrize("content", [b"[torchbay.backends]\nno equals sign\n", b"\xff\xfe\x00"])
def test_lists_the_rest_when_one_distribution_is_unreadable(shelf, caplog, content):
    shelf.publish("good")
    shelf.publish("bad")
    [damaged] = shelf.folder.glob("torchbay_bad*")
    (damaged / "entry_points.txt").write_bytes(content)
    assert {"eager", "good"} <= {one.name for one in torchbay.backends()}
    assert damaged.name in caplog.text
    assert call("good")


# https://github.com/pytorch/pytorch/pull/182989
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"options": {"fusoin": True}}, "no option 'fusoin'"),
        ({"options": {"fusion": "yes"}}, "'fusion' takes bool, not 'yes'"),
        ({"mode": "max-autotune"}, "has no modes"),
    ],
)
def test_refuses_a_misspelt_option_before_any_work(shelf, settings, complaint):
    source = shelf.source("mygpu", body="1 / 0").replace("= NoOptions", "= Options")
    options = """
        import attrs

        @attrs.frozen(kw_only=True)
        class Options:
            fusion: bool = False
            tile: int = 16
    """
    shelf.publish("mygpu", dedent(options) + source)
    with pytest.raises(errors.UnknownOption) as caught:
        torchbay.compile(double, backend="mygpu", **settings)
    assert complaint in caught.value.what
    assert "torchbay-mygpu 1.0" in caught.value.account
    is_ill_typed = "takes" in complaint
    assert is_ill_typed or "Known options: fusion, tile" in caught.value.remedy


# https://github.com/microsoft/onnxruntime/issues/23372
@pytest.mark.parametrize("allowed", [{}, {"fallback": None}, {"fallback": "eager"}])
def test_never_hides_a_crash_behind_another_backend(shelf, allowed):
    shelf.publish("mygpu", shelf.source("mygpu", body="1 / 0"))
    with pytest.raises(errors.BackendFailed, match="ZeroDivisionError") as caught:
        call("mygpu", **allowed)
    assert "torchbay-mygpu 1.0" in caught.value.account


# https://github.com/microsoft/onnxruntime/issues/23372
def test_serves_with_another_backend_only_where_the_caller_named_it(shelf):
    body = "from torchbay.plugin import UnsupportedGraph; raise UnsupportedGraph('no kernel')"
    shelf.publish("mygpu", shelf.source("mygpu", body=body))
    with pytest.raises(errors.NotServed, match="no kernel"):
        call("mygpu")
    compiled = call("mygpu", fallback="eager")
    assert torchbay.explain(compiled).specializations[0].backend == "eager"


# https://github.com/RDFLib/rdflib/issues/952
def test_scans_entry_points_once_and_not_on_import(shelf):
    program = """
        import importlib.metadata, json, torch
        scans, scan = [], importlib.metadata.entry_points
        def entry_points(**selection):
            scans.append(selection)
            return scan(**selection)
        importlib.metadata.entry_points = entry_points

        import torchbay
        counts = [len(scans)]
        for use in (torchbay.backends, torchbay.backends, lambda: torchbay.compile(print)):
            use()
            counts.append(len(scans))
        print(json.dumps(counts))
    """
    assert run(program, shelf) == [0, 1, 1, 1]


LISTING = """
    import json, sys, time
    import torchbay

    start = time.perf_counter()
    listed = torchbay.backends()
    seconds = time.perf_counter() - start
    imported = [name for name in sys.modules if name.startswith(("plugin_", "torchbay_"))]
    print(json.dumps([seconds, [one.name for one in listed], imported, "torch" in sys.modules]))
"""


def test_lists_five_of_which_three_are_broken_in_30_ms(shelf, record_property):
    for name in ("good", "better"):
        shelf.publish(name)
    shelf.publish("raises", "raise RuntimeError")
    shelf.publish("absent", module="plugin_absent")
    (shelf.folder / "plugin_absent.py").unlink()
    shelf.publish("misspelt", shelf.source("misspelt").replace("make_backend", "mak_backend"))
    runs = [run(LISTING, shelf) for _ in range(7)]
    for _, names, imported, has_torch in runs:
        assert {"good", "better", "raises", "absent", "misspelt"} <= set(names)
        assert (imported, has_torch) == ([], False)
    median = 1000 * statistics.median(seconds for seconds, *_ in runs)
    record_property("listing_ms", median)
    print(f"listing {len(runs[0][1])} backends: {median:.1f} ms")
    assert median < 30
