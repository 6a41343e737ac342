"""Backends are found through metadata and imported one at a time."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from importlib.metadata import EntryPoint

import pytest

from torchbay import _discovery, _registry, errors
from torchbay.plugin import API_VERSION, Backend


@pytest.fixture
def shelf(shelf, monkeypatch):
    """Take what is really installed away."""
    monkeypatch.setattr(_discovery, "entry_points", shelf.entry_points)
    return shelf


def states():
    return {listing.name: listing.state for listing in _registry.backends()}


def test_lists_without_importing(shelf):
    module = shelf.publish("fast", "raise RuntimeError")
    (listing,) = _registry.backends()
    assert (listing.name, listing.distribution, listing.version) == ("fast", "torchbay-fast", "1.0")
    assert (listing.state, listing.error) == ("installed", None)
    assert module not in sys.modules


def test_lists_nothing_when_nothing_is_installed(shelf):
    assert _registry.backends() == []


def test_scans_once_per_process(shelf):
    shelf.publish("fast")
    assert list(states()) == ["fast"]
    shelf.publish("late")
    assert list(states()) == ["fast"]
    _registry.forget()
    assert list(states()) == ["fast", "late"]


def test_imports_only_the_plugin_that_is_used(shelf):
    used, unused = shelf.publish("used"), shelf.publish("unused")
    assert isinstance(_registry.load("used"), Backend)
    assert used in sys.modules
    assert unused not in sys.modules
    assert states() == {"unused": "installed", "used": "loaded"}


def test_makes_a_backend_once(shelf):
    shelf.publish("fast")
    assert _registry.load("fast") is _registry.load("fast")
    assert _registry.loaded() == [_registry.load("fast")]


def test_makes_a_backend_once_across_threads(shelf):
    shelf.publish(
        "fast",
        "import time; time.sleep(0.05)\n" + shelf.source("fast"),
    )
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(_registry.load("fast"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len({id(one) for one in made}) == 1


def test_says_which_distribution_a_backend_came_from(shelf):
    shelf.publish("fast", distribution="Vendor-Fast", version="2.1")
    assert _registry.account(_registry.load("fast")) == "backend 'fast' from Vendor-Fast 2.1"


def test_lists_an_entry_point_of_unknown_origin(shelf, monkeypatch):
    orphan = EntryPoint(name="orphan", value="plugin_orphan", group="torchbay.backends")
    monkeypatch.setattr(_discovery, "entry_points", lambda group: [orphan])
    (listing,) = _registry.backends()
    assert listing.distribution == "an unknown distribution"
    with pytest.raises(errors.BackendBroken, match="from an unknown distribution"):
        _registry.load("orphan")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        pytest.param("import does_not_exist", "ModuleNotFoundError", id="import"),
        pytest.param("x = 1", "no torchbay_make_backend marked with hookimpl", id="no hook"),
        pytest.param(
            """
            from torchbay.plugin import hookimpl

            @hookimpl
            def torchbay_mak_backend(): ...
            """,
            "torchbay_mak_backend",
            id="misspelt hook",
        ),
        pytest.param(
            """
            from torchbay.plugin import hookimpl

            @hookimpl
            def torchbay_make_backend(color): ...
            """,
            "color",
            id="unknown argument",
        ),
        pytest.param(
            """
            from torchbay.plugin import hookimpl

            @hookimpl
            def torchbay_make_backend():
                raise OSError("no toolchain")
            """,
            "no toolchain",
            id="factory raises",
        ),
        pytest.param(
            """
            from torchbay.plugin import hookimpl

            @hookimpl
            def torchbay_make_backend():
                return object()
            """,
            "lacks name, api_version, capabilities, options, fingerprint, compile",
            id="no backend",
        ),
        pytest.param("raise SystemExit(3)", "SystemExit(3)", id="exits"),
        pytest.param(
            """
            from torchbay.plugin import hookimpl

            @hookimpl
            def torchbay_make_backend():
                import torchbay
                torchbay.compile(print, backend="broken", options={})
            """,
            "uses the backend that it is about to make",
            id="makes itself",
        ),
        pytest.param(
            """
            from torchbay.errors import BackendOutdated
            from torchbay.plugin import hookimpl

            @hookimpl
            def torchbay_make_backend():
                raise BackendOutdated("another one is", account="backend 'another'")
            """,
            "failed to load: BackendOutdated",
            id="blames another",
        ),
    ],
)
def test_keeps_a_broken_plugin_apart(shelf, source, complaint):
    shelf.publish("broken", source)
    shelf.publish("sound")
    with pytest.raises(errors.BackendBroken, match="plugin_broken") as caught:
        _registry.load("broken")
    assert complaint in str(caught.value)
    assert "backend 'broken' from torchbay-broken 1.0" in str(caught.value)
    assert caught.value.remedy
    assert _registry.load("sound").name == "sound"
    assert states() == {"broken": "broken", "sound": "loaded"}


@pytest.mark.parametrize(
    ("sound", "unsound", "complaint"),
    [
        ("return Backend()", "return Backend", "Backend is a class"),
        ("name = 'broken'", "name = 'other'", "calls itself 'other'"),
        ("name = 'broken'", "name = 3", "its name is 3, not a string"),
        ("api_version = 1", "api_version = True", "not an integer"),
        ("options = NoOptions", "options = None", "not a class"),
        ("def fingerprint(self)", "fingerprint = {}\n    def other(self)", "not a method"),
        (
            "options = NoOptions",
            "options = property(lambda self: 1 / 0)",
            "reading its members raised ZeroDivisionError",
        ),
    ],
)
def test_refuses_what_a_plugin_made(shelf, sound, unsound, complaint):
    source = shelf.source("broken")
    assert sound in source
    shelf.publish("broken", source.replace(sound, unsound))
    with pytest.raises(errors.BackendBroken, match=complaint):
        _registry.load("broken")
    assert states() == {"broken": "broken"}


def test_leaves_nothing_of_a_broken_plugin_registered(shelf):
    misspelt = """
        from torchbay.plugin import hookimpl

        @hookimpl
        def torchbay_compiled(report):
            raise RuntimeError("told")

        @hookimpl
        def torchbay_make_backend(): ...

        @hookimpl
        def torchbay_{}(report): ...
    """
    shelf.publish("silent", misspelt.format("declined"))
    shelf.publish("misspelt", misspelt.format("compield"))
    shelf.publish("sound")
    for name in ("silent", "misspelt"):
        with pytest.raises(errors.BackendBroken):
            _registry.load(name)
    _registry.load("sound")
    plugins = _registry._registry.plugins._manager
    assert plugins.get_plugins() == {sys.modules["plugin_sound"]}
    assert plugins.hook.torchbay_compiled.get_hookimpls() == []


def test_lists_while_another_thread_imports_a_plugin(shelf):
    shelf.publish("slow", "import sys; sys.started.set(); sys.proceed.wait(30); 1 / 0")
    sys.started, sys.proceed = threading.Event(), threading.Event()

    def load():
        with contextlib.suppress(errors.BackendBroken):
            _registry.load("slow")

    loading = threading.Thread(target=load)
    loading.start()
    try:
        assert sys.started.wait(30)
        assert states() == {"slow": "installed"}
    finally:
        sys.proceed.set()
        loading.join()
        del sys.started, sys.proceed
    assert states() == {"slow": "broken"}


def test_keeps_the_cause_and_does_not_try_again(shelf):
    shelf.publish("broken", "import sys; sys.tries = getattr(sys, 'tries', 0) + 1; 1 / 0")
    told = []
    for _ in range(2):
        with pytest.raises(errors.BackendBroken) as caught:
            _registry.load("broken")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert sys.__dict__.pop("tries") == 1
    (listing,) = _registry.backends()
    assert str(listing.error) == told[0]


def test_is_not_answered_by_another_plugin(shelf):
    shelf.publish(
        "thief",
        shelf.source("thief").replace("@hookimpl", "@hookimpl(tryfirst=True)"),
    )
    shelf.publish("honest")
    _registry.load("thief")
    assert _registry.load("honest").name == "honest"


def test_keeps_a_backend_whose_module_is_claimed_under_a_second_name(shelf):
    shelf.publish("first", module="plugin_shared")
    shelf.publish("second", shelf.source("first"), module="plugin_shared")
    _registry.load("first")
    with pytest.raises(errors.BackendBroken, match="already registered"):
        _registry.load("second")
    assert _registry.load("first").name == "first"


@pytest.mark.parametrize(
    ("version", "remedy"), [(0, "Upgrade the backend"), (API_VERSION + 1, "Upgrade torchbay")]
)
def test_names_both_versions_of_an_outdated_plugin(shelf, version, remedy):
    shelf.publish("old", shelf.source("old", version=version))
    for _ in range(2):
        with pytest.raises(
            errors.BackendOutdated, match=f"plugin API {version}.*{API_VERSION}"
        ) as caught:
            _registry.load("old")
        assert remedy in caught.value.remedy
    assert states() == {"old": "broken"}


def test_names_both_owners_of_one_name(shelf):
    shelf.publish("fast", distribution="one", version="1.0")
    shelf.publish("fast", distribution="two", version="2.0")
    with pytest.raises(
        errors.AmbiguousBackend, match="claimed by one 1.0 and two 2.0|two 2.0 and one 1.0"
    ):
        _registry.load("fast")
    (listing,) = _registry.backends()
    assert listing.state == "ambiguous"
    assert isinstance(listing.error, errors.AmbiguousBackend)


def test_counts_a_distribution_once_that_uninstalling_left_behind(shelf):
    shelf.publish("fast", distribution="Vendor", version="1.0")
    kept = next(shelf.folder.glob("*.dist-info"))
    shutil.copytree(kept, kept.with_name("~endor-1.0.dist-info"))
    assert states() == {"fast": "installed"}
    assert _registry.load("fast").name == "fast"


def test_takes_two_claims_of_one_distribution_for_ambiguous(shelf):
    shelf.publish("fast")
    listed = next(shelf.folder.glob("*.dist-info")) / "entry_points.txt"
    listed.write_text(listed.read_text() + "fast = plugin_other\n")
    assert states() == {"fast": "ambiguous"}


def test_lists_a_damaged_distribution(shelf):
    shelf.publish("fast")
    (next(shelf.folder.glob("*.dist-info")) / "METADATA").unlink()
    (listing,) = _registry.backends()
    assert (listing.name, listing.distribution) == ("fast", "an unknown distribution")


def test_names_installed_backends_and_near_misses(shelf):
    shelf.publish("mygpu")
    with pytest.raises(errors.UnknownBackend) as caught:
        _registry.load("mygpy")
    assert "'mygpy'" in caught.value.what
    assert "installed: mygpu" in caught.value.what
    assert "Did you mean 'mygpu'?" in caught.value.remedy
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("eager", "pip install torchbay-eager"),
        ("inductor_triton", "pip install torchbay-inductor-triton"),
        ("inductor", "pip install torchbay-inductor-triton"),
        ("aoti", "pip install torchbay-aoti"),
        ("triton", "pip install torchbay-inductor-triton"),
        ("torchbay-eager", "pip install torchbay-eager"),
        ("Inductor-Triton", "pip install torchbay-inductor-triton"),
    ],
)
def test_says_how_to_install_a_known_backend(shelf, name, command):
    with pytest.raises(errors.UnknownBackend, match="installed: none") as caught:
        _registry.load(name)
    assert command in caught.value.remedy


def test_hides_backends_named_in_the_environment(shelf, monkeypatch):
    module = shelf.publish("hidden")
    shelf.publish("seen")
    monkeypatch.setenv("TORCHBAY_SKIP_BACKENDS", "other, hidden")
    assert states() == {"hidden": "skipped", "seen": "installed"}
    with pytest.raises(errors.UnknownBackend, match="hidden by TORCHBAY_SKIP_BACKENDS"):
        _registry.load("hidden")
    assert module not in sys.modules
    assert _registry.choose(None).name == "seen"


def test_hides_none_of_the_rest(shelf, monkeypatch):
    shelf.publish("seen")
    for value in ("", " , ", "absent"):
        monkeypatch.setenv("TORCHBAY_SKIP_BACKENDS", value)
        assert states() == {"seen": "installed"}


def test_prefers_the_only_compiling_backend(shelf):
    shelf.publish("eager")
    shelf.publish("fast")
    assert _registry.choose(None).name == "fast"


def test_falls_back_on_the_reference_when_nothing_else_is_installed(shelf):
    shelf.publish("eager")
    assert _registry.choose(None).name == "eager"


def test_warns_when_the_only_compiling_backend_is_broken(shelf):
    shelf.publish("eager")
    shelf.publish("fast", "1 / 0")
    with pytest.warns(errors.TorchbayWarning, match="ZeroDivisionError"):
        assert _registry.choose(None).name == "eager"


def test_raises_when_the_only_backend_is_broken(shelf):
    shelf.publish("fast", "1 / 0")
    with pytest.raises(errors.BackendBroken):
        _registry.choose(None)


def test_asks_which_of_several_backends(shelf):
    for name in ("eager", "fast", "small"):
        shelf.publish(name)
    with pytest.raises(errors.AmbiguousBackend, match="fast, small") as caught:
        _registry.choose(None)
    assert "set_default_backend" in caught.value.remedy
    assert states() == dict.fromkeys(["eager", "fast", "small"], "installed")


def test_names_distributions_when_nothing_is_installed(shelf):
    with pytest.raises(errors.NoBackend) as caught:
        _registry.choose(None)
    for distribution in ("torchbay-inductor-triton", "torchbay-aoti", "torchbay-eager"):
        assert distribution in caught.value.remedy


def test_says_that_everything_is_hidden(shelf, monkeypatch):
    shelf.publish("fast")
    monkeypatch.setenv("TORCHBAY_SKIP_BACKENDS", "fast")
    with pytest.raises(errors.NoBackend, match="hides every installed backend"):
        _registry.choose(None)


def test_prefers_argument_then_default_then_environment(shelf, monkeypatch):
    for name in ("argument", "default", "environment"):
        shelf.publish(name)
    monkeypatch.setenv("TORCHBAY_BACKEND", "environment")
    assert _registry.choose(None).name == "environment"
    _registry.set_default_backend("default")
    assert _registry.choose(None).name == "default"
    assert _registry.choose("argument").name == "argument"
    _registry.set_default_backend(None)
    assert _registry.choose(None).name == "environment"


def test_says_that_the_environment_named_an_unknown_backend(shelf, monkeypatch):
    monkeypatch.setenv("TORCHBAY_BACKEND", "nope")
    with pytest.raises(errors.UnknownBackend, match="named by TORCHBAY_BACKEND"):
        _registry.choose(None)


def test_checks_a_default_without_importing_it(shelf):
    module = shelf.publish("fast")
    _registry.set_default_backend("fast")
    assert module not in sys.modules
    with pytest.raises(errors.UnknownBackend):
        _registry.set_default_backend("fats")
    with pytest.raises(errors.InvalidArgument):
        _registry.set_default_backend(3)
    assert _registry.choose(None).name == "fast"


def test_takes_a_backend_object(shelf):
    shelf.publish("fast")
    _registry.load("fast")
    made = sys.modules["plugin_fast"].Backend()
    assert _registry.choose(made) is made
    assert _registry.account(made) == "backend 'fast' (object of plugin_fast.Backend)"


def test_takes_a_plain_function(shelf):
    def shout(graph_module, example_inputs):
        return graph_module

    backend = _registry.choose(shout)
    assert isinstance(backend, Backend)
    assert backend.name == "shout"
    assert _registry.account(backend) == f"backend 'shout' ({__name__}.{shout.__qualname__})"


def test_checks_the_version_of_a_backend_object(shelf):
    shelf.publish("old", shelf.source("old", version=0))
    with pytest.raises(errors.BackendOutdated):
        _registry.load("old")
    with pytest.raises(errors.BackendOutdated, match="object of plugin_old.Backend"):
        _registry.choose(sys.modules["plugin_old"].Backend())


def test_refuses_the_class_of_a_backend(shelf):
    shelf.publish("fast")
    _registry.load("fast")
    with pytest.raises(errors.InvalidArgument, match="Backend is a class"):
        _registry.choose(sys.modules["plugin_fast"].Backend)


class Raising:
    """Has every member of a backend, none of which can be read."""

    compile = fingerprint = None

    @property
    def name(self):
        raise RuntimeError("not now")

    api_version = capabilities = options = name


@pytest.mark.parametrize("candidate", [3, ["eager"], object(), Raising()])
def test_refuses_what_is_no_backend(shelf, candidate):
    with pytest.raises(errors.InvalidArgument, match="cannot be used as a backend"):
        _registry.choose(candidate)
