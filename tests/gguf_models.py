"""Tiny random models of the classes that become GGUF files, each with a tokenizer of the kind that its family has."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import peftlab
from tests.byte_tokens import byte_tokenizer

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"llama-bpe": WORDS + r"\p{N}{1,3}" + REST, "qwen2": WORDS + r"\p{N}" + REST}
CORPUS = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog.",
    "One day in 1969 two people walked on the Moon; it wasn't easy, they'd said, but it'll be done by 2024.",
    "Prices rose by 3.5 % in March, less than most of the analysts had expected, and 12345 people noticed.",
    "def main(x):\n    return x + 1  # a comment\n\n\nprint(main(41))\t!!!",
    "Der große Bär läuft über die Straße. Ça c'est déjà vu! Привет, мир. 你好世界",
] * 20
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TEXTS = (
    "Once upon a time",
    "  leading spaces,   and  inner ones ",
    "It's 12345 o'clock!!! they'LL see...\n\n\nNew\tline\r\n end",
    "naïve Straße 你好 мир 🙂 x²",
    "",
    "a",
    "Hello<|im_end|>world",
)


@cache
def tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer trained on a few sentences: ``spm``, or byte-level with a pre-tokenizer of llama.cpp's name."""
    if kind == "bytes":
        return byte_tokenizer(TEMPLATE, [], bos="<|endoftext|>", eos="<|im_end|>")
    if kind == "spm":
        inner = _sentencepiece()
        special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    else:
        inner = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
        alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in SPLITS)
        first: list[Any] = []
        if kind == "smollm":
            first = [pre_tokenizers.Digits(individual_digits=True)]
        elif kind in SPLITS:
            first = [pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated")]
        inner.pre_tokenizer = pre_tokenizers.Sequence([*first, alone]) if first else alone
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        added = ["<|endoftext|>", "<|im_end|>"]
        inner.train_from_iterator(
            CORPUS, trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, special_tokens=added)
        )
        special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
        if kind == "llama-bpe":
            inner.post_processor = processors.TemplateProcessing(
                single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
            )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    made.chat_template = TEMPLATE
    return made


def _sentencepiece() -> Tokenizer:
    """Return a BPE tokenizer as transformers converts one of SentencePiece's: any two tokens that make one merge."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300))
    order = sorted(trained.get_vocab(), key=trained.token_to_id)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts += [text for text in order if len(text) > 1] + [text for text in order if len(text) == 1]
    vocabulary = {text: index for index, text in enumerate(texts)}
    merges = [
        (text[:at], text[at:])
        for text in texts[259:]
        for at in range(1, len(text))
        if text[:at] in vocabulary and text[at:] in vocabulary
    ]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
# Name -> class of the configuration, tokenizer, and what differs from _SIZES.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "spm", {}),
    "llama3": (
        "LlamaConfig",
        "llama-bpe",
        {
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-linear": (
        "LlamaConfig",
        "smollm",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", "spm", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", "qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "Qwen2Config",
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("Qwen3Config", "qwen2", {"head_dim": 32}),
    "gemma": ("GemmaConfig", "spm", {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("Gemma2Config", "spm", _GEMMA),
    "gemma3": ("Gemma3TextConfig", "spm", _GEMMA | {"num_hidden_layers": 7}),
    "phi3": ("Phi3Config", "spm", {"pad_token_id": None}),
    "gpt2": ("GPT2Config", "gpt-2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "olmo2": ("Olmo2Config", "llama-bpe", {}),
    "granite": (
        "GraniteConfig",
        "smollm",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3Config", "llama-bpe", {"num_hidden_layers": 5, "pad_token_id": None}),
    "starcoder2": ("Starcoder2Config", "bytes", {"sliding_window": None, "use_bias": True}),
}


def write_model(name: str, directory: Path, *, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """Write a random model, whose biases and norms are random too, and return ``directory``.

    Args:
        fields: of the configuration, in place of the ones in ``MODELS``.
    """
    kind, text, different = MODELS[name]
    tokens = tokenizer(text)
    sizes = {} if kind == "GPT2Config" else _SIZES
    vocabulary = len(tokens) + (13 if name in ("qwen2", "gemma3") else 0)  # rows without a token, as Qwen's
    ids = {"bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id}
    config = getattr(transformers, kind)(**{**sizes, "vocab_size": vocabulary, **ids, **different, **fields})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.1))
    model.to(dtype).save_pretrained(directory)
    tokens.save_pretrained(directory)
    return directory


def write_adapter(base: Path, directory: Path, *, scale: float = 0.2, **fields: Any) -> Path:
    """Write a LoRA adapter for all linear maps, with values large enough to change what is generated.

    Args:
        scale: of the values; with 0 the merged model is the base. fields: of the configuration.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    peftlab.inject_lora(model, **{"r": 4, "target_modules": "all-linear", **fields})
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * scale)
    peftlab.save_adapter(model, directory, base=str(base))
    return directory
