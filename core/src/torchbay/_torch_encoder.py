"""`torch.nn.TransformerEncoder` as it runs while a call is observed and traced.

Given a padding mask in inference, PyTorch's encoder drops padding by way of a nested tensor, which
no graph can hold, and puts zeros where padding was. Here it computes padding along, and then puts
the same zeros there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import TransformerEncoder, TransformerEncoderLayer
from torch.nn import functional as F  # noqa: N812 - as torch's own code calls it

from torchbay._torch_compat import fast_path_enabled, function_modes, is_inside_trace

__all__ = ["ENCODER_CODE", "PADDED_CODE", "drops_padding", "follows", "padded_encoders"]

_forward = TransformerEncoder.forward
_DEVICES = ("cpu", "cuda", "xpu", torch.utils.backend_registration._privateuse1_backend_name)

_lock = threading.Lock()
_users = 0
_here = threading.local()


@contextlib.contextmanager
def padded_encoders() -> Iterator[None]:
    """Let encoders compute padding along instead of dropping it.

    There is one forward per process: its replacement is counted, and taken back when its last user
    leaves. Encoders that other threads run meanwhile return what they always return.
    """
    global _users
    with _lock:
        _users += 1
        if TransformerEncoder.forward is _forward:
            TransformerEncoder.forward = _padded_forward  # type: ignore[method-assign]
    before, _here.is_observing = _is_observing(), True
    try:
        yield
    finally:
        _here.is_observing = before
        with _lock:
            _users -= 1
            if _users == 0 and TransformerEncoder.forward is _padded_forward:
                TransformerEncoder.forward = _forward  # type: ignore[method-assign]


def _is_observing() -> bool:
    """Whether this thread is observing or tracing a call."""
    return getattr(_here, "is_observing", False)


def _padded_forward(
    self: TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,  # noqa: FBT001 - as the original has it
) -> torch.Tensor:
    """Pass the input through the encoder layers in turn."""
    is_foreign = torch.compiler.is_dynamo_compiling() or (not _is_observing() and is_inside_trace())
    if is_foreign or not drops_padding(self, src, mask, src_key_padding_mask):
        return _forward(self, src, mask, src_key_padding_mask, is_causal)
    kept = _kept(src, src_key_padding_mask)
    if not follows(self) or not _can_drop(self, src, kept):
        return _forward(self, src, mask, src_key_padding_mask, is_causal)
    return _padded(self, src, kept)


ENCODER_CODE = _forward.__code__
PADDED_CODE = _padded_forward.__code__


def drops_padding(
    encoder: TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None,
    src_key_padding_mask: torch.Tensor | None,
) -> bool:
    """Whether plain eager execution would drop padding, if it is at the end of each sequence."""
    return (
        mask is None
        and src_key_padding_mask is not None
        and getattr(encoder, "use_nested_tensor", False)
        and fast_path_enabled()
        and len(encoder.layers) > 0
        and not encoder.layers[0].training
        and src.dim() == 3
        and not src.is_nested
        and src.device.type in _DEVICES
        and not torch.is_autocast_enabled()
        and not _has_foreign_mode()
        and not _needs_grad(encoder.layers[0], src)
    )


def follows(encoder: TransformerEncoder) -> bool:
    """Whether an encoder's layers are PyTorch's own, so that it is known what they compute."""
    return all(
        type(layer) is TransformerEncoderLayer
        and "forward" not in vars(layer)
        and not any(module.training or _has_hooks(module) for module in layer.modules())
        for layer in encoder.layers
    )


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _has_foreign_mode() -> bool:
    """Whether a torch-function mode is active that the program or its caller entered."""
    ours = ("torch.fx.", "torchbay.")
    return any(not type(mode).__module__.startswith(ours) for mode in function_modes())


def _needs_grad(layer: Any, src: torch.Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    attention = layer.self_attn
    modules = (attention.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    weights = [weight for module in modules for weight in (module.weight, module.bias)]
    tensors = (src, attention.in_proj_weight, attention.in_proj_bias, *weights)
    return any(tensor.requires_grad for tensor in tensors)


def _kept(src: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
    """Return which elements are no padding: of a mask of numbers, those that are zero."""
    mask = F._canonical_mask(
        mask=padding_mask,
        mask_name="src_key_padding_mask",
        other_type=None,
        other_name="mask",
        target_type=src.dtype,
    )
    assert mask is not None, "an encoder without a mask drops nothing"
    return mask.logical_not()


def _can_drop(encoder: TransformerEncoder, src: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether padding is where the encoder drops it; raises what the original would raise."""
    if kept.shape != src.shape[:2] or src.shape[1] == 0:
        torch._nested_tensor_from_mask(src, kept, mask_check=False)
    is_checked = getattr(encoder, "mask_check", True)
    is_aligned = (kept[:, 1:] <= kept[:, :-1]).all() if is_checked else kept.any()
    if bool(is_aligned & kept.any()):
        return True
    if is_checked and not bool(is_aligned):
        return False
    dropped = torch._nested_tensor_from_mask(src, kept, mask_check=False)
    raise RuntimeError(f"nothing but padding: {dropped.to_padded_tensor(0.0, src.size())}")


def _padded(encoder: TransformerEncoder, src: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    # As many as are kept, from the left: so a nested tensor is made of an unchecked mask.
    positions = torch.arange(src.shape[1], device=src.device)
    padding = positions >= kept.sum(dim=1, keepdim=True)
    outside = padding.unsqueeze(-1)
    # What stands in padding, infinity included, must not reach the rest.
    output = src.masked_fill(outside, 0.0)
    for layer in encoder.layers:
        output = layer(output, src_key_padding_mask=padding)
    output = output.masked_fill(outside, 0.0)
    return output if encoder.norm is None else encoder.norm(output)
