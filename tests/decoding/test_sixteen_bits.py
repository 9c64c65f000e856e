"""Models stored in 16 bits keep their dtype: in the logits of greedy decoding, and in weights that a merge writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_free import PromptLookup, TokenRecycling
from peftlab.models.load import load_base

TOKENS = 83


def tiny(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, eos_token_id=None, **sizes)).to(dtype).eval()


class Logits(TorchDispatchMode):
    """Notes the dtype of every tensor with as many columns as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape[-1:] == (TOKENS,):
            self.dtypes.add(result.dtype)
        return result


@pytest.mark.parametrize("drafter", [None, PromptLookup, TokenRecycling], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("flat", [True, False])
def test_greedy_decoding_in_bf16_makes_no_fp32_logits(drafter: Callable[[], object] | None, flat: bool) -> None:
    prompts = [[3, 4, 5, 3, 4], [7, 8, 7, 8, 7]]
    for dtype in (torch.bfloat16, torch.float32):  # in fp32 there are some: they would be seen
        engine = build_engine(tiny(dtype), flat=flat)
        with Logits() as seen:
            decode(engine, prompts, StoppingCriteria(6), drafter() if drafter is not None else None)
        assert seen.dtypes & {torch.bfloat16, torch.float32} == {dtype}


def test_a_merge_into_a_bf16_base_decodes_from_16_bits(tmp_path: Path) -> None:
    """Though the adapter was trained in fp32, beside the base in fp32."""
    tiny(torch.bfloat16).save_pretrained(tmp_path / "base")
    model, _ = load_base(str(tmp_path / "base"), "AutoModelForCausalLM")
    assert model.dtype == torch.float32
    peftlab.inject_lora(model, r=4, target_modules="all-linear")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    peftlab.save_adapter(model, tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", str(tmp_path / "base"), tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    merged, _ = load_base(str(tmp_path / "merged"), "AutoModelForCausalLM")
    assert merged.dtype == torch.float32
    base = load_file(tmp_path / "base" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(stored[name], base[name])
    if "fbgemm" in torch.backends.quantized.supported_engines:
        assert build_engine(merged).packed == ("weights in 16 bits",)
