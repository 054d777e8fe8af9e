"""The tiny transformers models that our C++ models are compared with.

One entry per family in FAMILIES: a function from (vocabulary, positions) to a
transformers config. The sizes are small and odd on purpose: head width, FFN and
vocabulary are not multiples of a SIMD vector, and every feature that a family has
(grouped kv heads, biases, q/k norm, scaled rotary, untied head) is switched on.
"""

import pathlib

import numpy as np
import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def gpt2_config(vocab: int, positions: int) -> transformers.PreTrainedConfig:
    """GPT-2: learned positions, tied head, biases everywhere, FFN not 4·C."""
    return transformers.GPT2Config(
        vocab_size=vocab, n_positions=positions, n_embd=32, n_layer=2, n_head=4,
        n_inner=72, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=vocab - 1, eos_token_id=vocab - 1)


def llama_config(vocab: int, positions: int) -> transformers.PreTrainedConfig:
    """Llama 3: GQA, untied head, llama3 rope scaling.

    With theta 500 and head width 10 the five wavelengths are 6.3, 22, 75, 261 and
    905 tokens; with 64 original positions the limits are 16 and 64: one frequency
    is kept, one is interpolated, three are divided by the factor.
    """
    return transformers.LlamaConfig(
        vocab_size=vocab, max_position_embeddings=max(positions, 256), hidden_size=40,
        intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
        bos_token_id=vocab - 1, eos_token_id=vocab - 1)


def qwen2_config(vocab: int, positions: int) -> transformers.PreTrainedConfig:
    """Qwen2: biases on q, k and v but not on o; tied head."""
    return transformers.Qwen2Config(
        vocab_size=vocab, max_position_embeddings=positions, hidden_size=32,
        intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=vocab - 1, eos_token_id=vocab - 1)


def qwen3_config(vocab: int, positions: int) -> transformers.PreTrainedConfig:
    """Qwen3: q/k norm; heads · head_dim = 64 is not hidden_size = 32; tied head."""
    return transformers.Qwen3Config(
        vocab_size=vocab, max_position_embeddings=positions, hidden_size=32,
        intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=vocab - 1, eos_token_id=vocab - 1)


FAMILIES = {"gpt2": gpt2_config, "llama": llama_config,
            "qwen2": qwen2_config, "qwen3": qwen3_config}


def build(config: transformers.PreTrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """A causal language model of that config, in training mode (no dropout is on)."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager")
    return model.train()


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Replaces every parameter, so that no bias is 0 and no norm weight is 1.

    Drawn with numpy in name order: torch's own initialisation changes with versions.
    """
    rng = np.random.default_rng(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim >= 2:
            value = rng.normal(0.0, 0.15, parameter.shape)
        elif name.endswith(".bias"):
            value = rng.normal(0.0, 0.1, parameter.shape)
        else:  # the weight of a LayerNorm or RMSNorm
            value = rng.uniform(0.5, 1.5, parameter.shape)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(value))


def save(model: torch.nn.Module, folder: pathlib.Path) -> None:
    """Writes config.json and model.safetensors, like save_pretrained, and nothing else."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
