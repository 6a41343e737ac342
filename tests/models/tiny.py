"""Seven transformers models with tiny random weights, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
WORDS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _ids(length: int = 12) -> torch.Tensor:
    return torch.randint(3, 97, (2, length))


def gpt2():
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, **WORDS)
    return transformers.GPT2LMHeadModel(config), {"input_ids": _ids()}


def bert():
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    model = transformers.BertModel(transformers.BertConfig(**SMALL, **WORDS))
    return model, {"input_ids": _ids(), "attention_mask": mask}


def llama():
    config = transformers.LlamaConfig(num_key_value_heads=1, **SMALL, **WORDS)
    return transformers.LlamaForCausalLM(config), {"input_ids": _ids()}


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0, **WORDS
    )
    inputs = {"input_ids": _ids(), "decoder_input_ids": _ids(5)}
    return transformers.T5ForConditionalGeneration(config), inputs


def vit():
    config = transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def whisper():
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=50,
        max_target_positions=50,
        num_mel_bins=20,
        decoder_start_token_id=1,
        **WORDS,
    )
    inputs = {"input_features": torch.randn(2, 20, 100), "decoder_input_ids": _ids(5)}
    return transformers.WhisperForConditionalGeneration(config), inputs


def mixtral():
    config = transformers.MixtralConfig(
        num_key_value_heads=1, num_local_experts=4, **SMALL, **WORDS
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": _ids()}


MODELS: dict[str, Callable] = {
    make.__name__: make for make in (gpt2, bert, llama, t5, vit, whisper, mixtral)
}


def make(name: str, device: str = "cpu"):
    """Return a model in eval mode and the arguments of a call, the same every time."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval().to(device), {key: value.to(device) for key, value in inputs.items()}
