"""Plain decoding beside ``transformers.generate``, for each family of decoders that runs as a flattened step.

Run alone on the machine: ``python -m tests.benchmarks families``. The models have the sizes of SmolLM2-135M (30 layers of
width 576, 49,152 tokens) and random weights that 16 bits represent, as a published checkpoint has: what is timed does
not depend on the values. Greedy, one sequence, medians of passes that take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from tests.benchmarks.figures import Figure, ranged

NEW, PROMPT, REPEATS = 48, 32, 3
TITLE = "Plain decoding by family"
CONDITIONS = (
    "Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3, Phi-3, SmolLM3, OLMo 2, GPT-2 and GPT-NeoX with SmolLM2-135M's sizes "
    f"and random weights of 16 bits; greedy, {NEW} new tokens; median and range over the families."
)
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}
SIZES = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
         "max_position_embeddings": 1024, "tie_word_embeddings": True, "pad_token_id": 0, **HEADS}  # fmt: skip
GPT = {"vocab_size": 49152, "n_embd": 576, "n_layer": 30, "n_head": 9, "n_positions": 1024}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 64},
    "gemma2": SIZES | {"head_dim": 64},
    "gemma3_text": SIZES | {"head_dim": 64},
    "phi3": SIZES,
    "smollm3": SIZES,
    "olmo2": SIZES,
    "gpt2": GPT,
    "gpt_neox": SIZES,
}


def model_of(family: str) -> Any:
    """Return a model with random weights, rounded to bf16 and held in fp32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    model.generation_config.eos_token_id = None
    return model.bfloat16().float().eval()


def measure(family: str) -> dict[str, float]:
    """Print one family's row, and return how many times as fast ours is as ``generate``, by its dtype."""
    model = model_of(family)
    rounded = model_of(family).bfloat16()
    engine = build_engine(model)
    prompt = torch.randint(1, 49152, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = torch.tensor([prompt])

    def generate(of: Any) -> list[int]:
        mask = torch.ones_like(ids)
        new = of.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        return new[0, PROMPT:].tolist()

    def plain() -> list[int]:
        return decode(engine, [prompt], StoppingCriteria(NEW))[0].tokens

    contenders: dict[str, Callable[[], list[int]]] = {
        "fp32": lambda: generate(model),
        "bf16": lambda: generate(rounded),
        "ours": plain,
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    outputs = {name: run() for name, run in contenders.items()}
    for _ in range(REPEATS):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    rate = {name: NEW / statistics.median(taken) for name, taken in seconds.items()}
    same = "yes" if outputs["ours"] == outputs["fp32"] else "no"
    rates = " | ".join(f"{rate[name]:.1f}" for name in contenders)
    gains = f"{rate['ours'] / rate['fp32']:.2f} | {rate['ours'] / rate['bf16']:.2f}"
    print(f"| {family} | {engine.kind} | {rates} | {gains} | {same} |", flush=True)
    return {dtype: rate["ours"] / rate[dtype] for dtype in ("fp32", "bf16")}


def main() -> list[Figure]:
    """Print the table and return the ratios over all families."""
    print(
        "| family | our kernel | generate fp32, tokens/s | generate bf16 | peftlab | of fp32 | of bf16 | tokens equal |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found = [measure(family) for family in FAMILIES]
    work = f"plain decoding, {len(FAMILIES)} families"
    return [
        ranged(work, f"transformers.generate in {dtype}", [gains[dtype] for gains in found])
        for dtype in ("fp32", "bf16")
    ]


if __name__ == "__main__":
    main()
