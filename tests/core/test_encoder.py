"""An encoder that drops padding is served as if it did, from one graph."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import torchbay
from torchbay._torch_compat import compiler_flag
from torchbay._torch_encoder import padded_encoders

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ORIGINAL = nn.TransformerEncoder.forward
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


def padding(*lengths):
    return torch.arange(5)[None] >= torch.tensor(lengths)[:, None]


ENDS = padding(3, 5, 2)
GAPS = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
SQUARE = torch.zeros(5, 5).bool()


def encoder(kind=nn.TransformerEncoder, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return kind(layer, 2, **options).eval()


def check(module, *calls, backend, served):
    """Compare calls with plain ones, twice each; ``served`` are the calls served each way."""
    compiled = torchbay.compile(module, backend=backend)
    for x, options in [*calls, *calls]:
        torch.manual_seed(1)
        found = compiled(x, **options)
        torch.manual_seed(1)
        torch.testing.assert_close(found, module(x, **options))
    assert dict(torchbay.explain(compiled).calls) == served
    assert nn.TransformerEncoder.forward is ORIGINAL
    return compiled


CALLS = {
    "padding at the ends": (X, {"src_key_padding_mask": ENDS}),
    "a sequence that is all padding": (X, {"src_key_padding_mask": padding(3, 0, 2)}),
    "no padding": (X, {"src_key_padding_mask": padding(5, 5, 5)}),
    "padding in between": (X, {"src_key_padding_mask": GAPS}),
    "a mask of numbers": (X, {"src_key_padding_mask": ENDS * -0.5}),
    "a mask of infinities": (X, {"src_key_padding_mask": X[..., 0].new_zeros(3, 5).masked_fill(ENDS, -torch.inf)}),
    "a causal hint": (X, {"src_key_padding_mask": ENDS, "is_causal": True}),
    "a second mask": (X, {"src_key_padding_mask": ENDS, "mask": SQUARE}),
    "infinity in padding": (X.masked_fill(ENDS[..., None], torch.inf), {"src_key_padding_mask": ENDS}),
    "no mask": (X, {}),
}  # fmt: skip

ENCODERS = {
    "plain": {},
    "norm": {"norm": nn.LayerNorm(8)},
    "without a check of the mask": {"mask_check": False},
}


@pytest.mark.parametrize("options", ENCODERS)
@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_serves_an_encoder_given(name, options, recording):
    module = encoder(**ENCODERS[options])
    check(module, CALLS[name], backend=recording, served={"graph": 1, "eager": 1})


@pytest.mark.parametrize("mask", [ENDS, GAPS], ids=["at the ends", "in between"])
@torch.no_grad()
def test_leaves_padding_where_no_nested_tensors_are_wanted(mask, recording):
    module, given = encoder(enable_nested_tensor=False), {"src_key_padding_mask": mask}
    compiled = check(module, (X, given), backend=recording, served={"graph": 1, "eager": 1})
    assert compiled(X, **given)[mask].all()


@torch.no_grad()
def test_puts_zeros_where_padding_was(recording):
    compiled = torchbay.compile(encoder(), backend=recording)
    for _ in range(2):
        found = compiled(X, src_key_padding_mask=ENDS)
        assert not found[ENDS].any()
        assert found[~ENDS].all()


@torch.no_grad()
def test_serves_any_padding_at_the_ends_from_one_graph(recording):
    calls = [(X, {"src_key_padding_mask": padding(*n)}) for n in ((3, 5, 2), (1, 1, 5), (0, 4, 4))]
    check(encoder(), *calls, backend=recording, served={"graph": 5, "eager": 1})


@torch.no_grad()
def test_takes_another_way_for_padding_in_between(recording):
    calls = [(X, {"src_key_padding_mask": mask}) for mask in (ENDS, GAPS)]
    check(encoder(), *calls, backend=recording, served={"graph": 2, "eager": 2})


@torch.no_grad()
def test_raises_what_the_encoder_raises_for_nothing_but_padding(recording):
    compiled = torchbay.compile(encoder(), backend=recording)
    compiled(X, src_key_padding_mask=ENDS)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="to_padded_tensor"):
            compiled(X, src_key_padding_mask=padding(0, 0, 0))


@torch.no_grad()
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 5)])
def test_raises_what_the_encoder_raises_for_a_mask_of_other_sizes(shape, recording):
    mask = torch.zeros(shape).bool()
    with pytest.raises(RuntimeError) as expected:
        encoder()(X, src_key_padding_mask=mask)
    with pytest.raises(RuntimeError) as found:
        torchbay.compile(encoder(), backend=recording)(X, src_key_padding_mask=mask)
    assert str(found.value) == str(expected.value)


@torch.no_grad()
def test_serves_training_mode(recording):
    given = {"src_key_padding_mask": ENDS}
    check(encoder().train(), (X, given), backend=recording, served={"graph": 1, "eager": 1})


@torch.no_grad()
def test_follows_a_switch_to_training_and_back(recording):
    module = encoder()
    compiled = torchbay.compile(module, backend=recording)
    for is_training in (False, True, False, True):
        module.train(is_training)
        torch.manual_seed(1)
        found = compiled(X, src_key_padding_mask=ENDS)
        torch.manual_seed(1)
        torch.testing.assert_close(found, module(X, src_key_padding_mask=ENDS))
    assert dict(torchbay.explain(compiled).calls) == {"graph": 2, "eager": 2}


@torch.enable_grad()
def test_serves_frozen_weights_with_gradients_enabled(recording):
    module = encoder().requires_grad_(False)
    given = {"src_key_padding_mask": ENDS}
    check(module, (X, given), backend=recording, served={"graph": 1, "eager": 1})


@pytest.mark.filterwarnings("ignore::torchbay.errors.TorchbayWarning")
@torch.enable_grad()
def test_is_right_with_gradients(recording):
    given = {"src_key_padding_mask": ENDS}
    check(encoder(), (X, given), backend=recording, served={"graph": 0, "eager": 2})


@torch.no_grad()
def test_keeps_padding_under_a_default_device(recording):
    given = {"src_key_padding_mask": ENDS}
    with torch.device("cpu"):
        module = encoder()
        check(module, (X, given), backend=recording, served={"graph": 1, "eager": 1})


@torch.no_grad()
def test_follows_the_switch_of_the_fast_path(recording):
    module = encoder()
    compiled = torchbay.compile(module, backend=recording)
    try:
        for is_enabled in (True, False, True, False):
            torch.backends.mha.set_fastpath_enabled(is_enabled)
            found = compiled(X, src_key_padding_mask=ENDS)
            torch.testing.assert_close(found, module(X, src_key_padding_mask=ENDS))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    explanation = torchbay.explain(compiled)
    assert dict(explanation.calls) == {"graph": 2, "eager": 2}
    assert "get_fastpath_enabled" in explanation.recompiles[0][0]


@torch.no_grad()
def test_follows_an_attribute_of_the_encoder(recording):
    module = encoder()
    compiled = torchbay.compile(module, backend=recording)
    for is_nested in (True, False, True, False):
        module.use_nested_tensor = is_nested
        found = compiled(X, src_key_padding_mask=ENDS)
        torch.testing.assert_close(found, module(X, src_key_padding_mask=ENDS))
    assert dict(torchbay.explain(compiled).calls) == {"graph": 2, "eager": 2}


class Own(nn.TransformerEncoder):
    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        return src * 2 + src_key_padding_mask.sum()


class Doubled(nn.TransformerEncoder):
    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        return 2 * super().forward(src, mask, src_key_padding_mask, is_causal)


class Inherited(nn.TransformerEncoder):
    pass


@pytest.mark.parametrize("kind", [Own, Doubled, Inherited])
@torch.no_grad()
def test_serves_subclasses(kind, recording):
    given = {"src_key_padding_mask": ENDS}
    check(encoder(kind), (X, given), backend=recording, served={"graph": 1, "eager": 1})


class Bound(nn.TransformerEncoder):
    forward = ORIGINAL


class OwnLayer(nn.TransformerEncoderLayer):
    pass


def _with_own_layers():
    layer = OwnLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def _with_hooks():
    module = encoder()
    module.layers[1].register_forward_hook(hook)
    return module


def hook(layer, args, output):
    return output + 0


UNKNOWN = {
    "the original under a name of its own": lambda: encoder(Bound),
    "layers of its own": _with_own_layers,
    "hooks on its layers": _with_hooks,
}


@pytest.mark.parametrize("name", UNKNOWN)
@torch.no_grad()
def test_runs_eagerly_an_encoder_with(name, recording):
    compiled, module = torchbay.compile(UNKNOWN[name](), backend=recording), UNKNOWN[name]()
    module.load_state_dict(compiled.original.state_dict())
    with pytest.warns(torchbay.errors.TorchbayWarning, match="nested tensor"):
        found = compiled(X, src_key_padding_mask=ENDS)
    for result in (found, compiled(X, src_key_padding_mask=ENDS)):
        torch.testing.assert_close(result, module(X, src_key_padding_mask=ENDS))
    assert dict(torchbay.explain(compiled).calls) == {"graph": 0, "eager": 2}


@torch.no_grad()
def test_leaves_encoders_of_other_threads_as_they_are():
    module, found = encoder(), []

    def run():
        with torch.no_grad():
            found.extend(module(X, src_key_padding_mask=mask) for mask in (ENDS, GAPS))

    expected = [module(X, src_key_padding_mask=mask) for mask in (ENDS, GAPS)]
    with compiler_flag(), padded_encoders():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    torch.testing.assert_close(found, expected)


def test_puts_the_forward_back_when_the_last_user_leaves():
    with padded_encoders():
        with padded_encoders():
            replaced = nn.TransformerEncoder.forward
        assert nn.TransformerEncoder.forward is replaced is not ORIGINAL
    assert nn.TransformerEncoder.forward is ORIGINAL


def test_leaves_a_forward_that_somebody_else_replaced(monkeypatch):
    def forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
        return src

    monkeypatch.setattr(nn.TransformerEncoder, "forward", forward)
    with padded_encoders():
        assert nn.TransformerEncoder.forward is forward
    assert nn.TransformerEncoder.forward is forward


@torch.no_grad()
def test_lets_go_when_a_call_raises(recording):
    def fails(x):
        raise KeyError

    with pytest.raises(KeyError):
        torchbay.compile(fails, backend=recording)(X)
    assert nn.TransformerEncoder.forward is ORIGINAL


@torch.no_grad()
def test_serves_an_encoder_of_double_precision(recording):
    module = encoder().double()
    given = {"src_key_padding_mask": ENDS}
    check(module, (X.double(), given), backend=recording, served={"graph": 1, "eager": 1})
