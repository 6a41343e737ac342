"""Options of the plugins are refused before anything compiles, with what to do instead."""

from __future__ import annotations

import pytest

from torchbay.errors import UnknownOption
from torchbay_aoti._options import AotiOptions
from torchbay_inductor_triton._options import InductorOptions

BOTH = pytest.mark.parametrize("options", [InductorOptions, AotiOptions])


@BOTH
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_autotun": True}, "Did you mean 'max_autotune'"),
        ({"nothing_like_it_zzz": 1}, "list_options"),
        ({"max_autotune": 1}, "Its type is bool"),
        ({"cpp.threads": True}, "Its type is int"),
        ({"cpp.simdlen": "wide"}, "Its type is .*int"),
        ({"freezing": True}, "reads weights on every call"),
        ({"mode": "fast"}, "Modes: default"),
        ({"aot_inductor.package": True}, "aot_inductor.package"),
    ],
)
def test_refuses_what_inductor_does_not_have(options, given, said):
    with pytest.raises(UnknownOption, match=said):
        options(**given)


@BOTH
def test_takes_settings_by_dotted_name(options):
    taken = options(**{"cpp.simdlen": None, "epilogue_fusion": False, "max-autotune": True})
    assert taken.settings == {
        "cpp.simdlen": None,
        "epilogue_fusion": False,
        "max_autotune": True,
    }


@BOTH
def test_compares_by_what_it_sets(options):
    assert options() == options(mode="default")
    assert hash(options(max_autotune=True)) == hash(options(max_autotune=True))
    assert options(max_autotune=True) != options(max_autotune=False)


def test_settings_win_over_the_mode():
    taken = InductorOptions(mode="max-autotune", max_autotune=False)
    assert taken.settings["triton.cudagraphs"] is True
    assert taken.settings["max_autotune"] is False


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_aoti_refuses_modes_that_mean_cuda_graphs(mode):
    with pytest.raises(UnknownOption, match="max-autotune-no-cudagraphs"):
        AotiOptions(mode=mode)


@pytest.mark.slow
def test_settings_hold_while_compiling_and_no_longer(make_request):
    from torch._inductor import config

    from torchbay_inductor_triton._backend import InductorBackend

    seen = []

    def record(graph):
        seen.append(config.cpp.simdlen)

    options = InductorOptions(**{"cpp.simdlen": 256, "post_grad_custom_post_pass": record})
    import torch

    request = make_request(lambda x: (x * 3,), [torch.ones(5)], options=options)
    InductorBackend().compile(request)
    assert seen == [256]
    assert config.cpp.simdlen is None
