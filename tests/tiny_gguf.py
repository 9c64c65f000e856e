"""A GGUF file of a tiny Llama in Q4_1, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

WIDTH, HIDDEN, LAYERS, HEADS = 64, 96, 2, 2


def write_gguf(path: Path) -> Path:
    """Write the file, with random weights, and return its path."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])  # control tokens, then normal ones
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random, of_type = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_1
    square, up, down = (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    shapes = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square}
    shapes |= {"ffn_gate": up, "ffn_up": up, "ffn_down": down}
    weights = {"token_embd": (len(tokens), WIDTH)}
    weights |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    for name, shape in weights.items():
        values = random.standard_normal(shape, dtype=np.float32) * 0.1
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, of_type), raw_dtype=of_type)
    for name in ("output_norm", *(f"blk.{layer}.{norm}_norm" for layer in range(LAYERS) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
