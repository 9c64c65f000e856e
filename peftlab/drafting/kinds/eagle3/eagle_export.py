"""EAGLE-3 drafts as vLLM and SGLang load them: the same tensors, and a configuration each."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peftlab.drafting.kinds.eagle3.eagle_files import (
    WEIGHTS,
    layer_config,
    norm_flags,
    read_eagle,
    read_shape,
    speculators_config,
)
from peftlab.drafting.kinds.eagle3.eagle_network import Eagle3
from peftlab.drafting.kinds.eagle3.target_identity import check_tokenizer
from peftlab.errors import PeftlabError
from peftlab.files import Json, write_json
from peftlab.models.pretrained import load_config, load_tokenizer


@dataclass(frozen=True)
class EagleExport:
    """See ``kinds.base.Exporting``.

    Attributes:
        place: directory of the draft. consumer: ``vllm`` or ``sglang``.
    """

    place: Path
    consumer: str

    def write(self, target: str, directory: Path, gamma: int) -> float:
        shape, _ = read_shape(self.place)
        check_tokenizer(self.place, load_tokenizer(target))
        config = load_config(target).get_text_config(decoder=True)
        own, wanted = (config.vocab_size, config.hidden_size), (shape.vocab_size, shape.hidden_size)
        if own != wanted or max(shape.features) >= config.num_hidden_layers:
            raise PeftlabError(
                f"{self.place}: for a target of {wanted[0]} tokens, states of {wanted[1]} and more than "
                f"{max(shape.features)} layers; {target} has {own[0]}, {own[1]} and {config.num_hidden_layers}"
            )
        if len(shape.features) != 3:
            raise PeftlabError(
                f"--for {self.consumer}: the draft reads {len(shape.features)} states; engines give three"
            )
        if self.consumer == "sglang" and shape.norm_before_residual:
            raise PeftlabError(
                f"--for sglang: {self.place} has norm_before_residual, which SGLang does not read: it would "
                "compute other logits without a word; vllm loads the draft"
            )
        embedding = torch.ones(1).expand(shape.vocab_size, shape.hidden_size)
        network = read_eagle(self.place, embedding)
        if self.consumer == "vllm":
            architecture = (config.architectures or [""])[0]
            values = speculators_config(network, target=target, architecture=architecture, tokens=gamma)
        else:
            values = sglang_config(network)
        shutil.copyfile(self.place / WEIGHTS, directory / WEIGHTS)
        write_json(directory / "config.json", values)
        difference = float((_logits(network) - _logits(read_eagle(directory, embedding))).abs().max())
        if difference > 0:
            raise PeftlabError(f"{directory}: computes other logits than {self.place} (by {difference:.2g})")
        return difference

    def command(self, target: str, directory: str, gamma: int) -> str:
        if self.consumer == "vllm":
            settings = {"method": "eagle3", "model": directory, "num_speculative_tokens": gamma}
            return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(settings))}"
        window = read_shape(self.place)[0].window  # which SGLang does not read from the file
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(directory)} --speculative-num-steps {gamma} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {gamma + 1}"
            + (f" --speculative-draft-window-size {window}" if window is not None else "")
        )


def sglang_config(network: Eagle3) -> dict[str, Json]:
    """Return the configuration that SGLang reads: a Llama's, with the size of the drafted vocabulary."""
    # SGLang numbers layers by the state that leaves them, and without numbers takes 2, L/2 and L - 3 as they enter.
    layers: list[Json] = [layer - 1 for layer in network.features]
    flags = {name: flag for name, flag in norm_flags(network.shape).items() if flag}
    return (
        layer_config(network.shape, network.fc.weight.dtype)
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(network.lm_head.weight),
            "target_hidden_size": network.shape.hidden_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        }
        | flags
    )


@torch.no_grad()
def _logits(network: Eagle3) -> Tensor:
    """Return logits of the drafted tokens for one text, by the target's ids, computed in float32."""
    network.parts_to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 8, len(network.features) * network.shape.hidden_size, generator=generator)
    tokens = torch.arange(8)[None] % network.vocab_size

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    states = network.rows(tokens, network.fuse(features), torch.arange(8)[None], attend)
    logits = network.logits(states).float()
    whole = torch.zeros(1, 8, network.vocab_size)
    return logits if network.tokens is None else whole.index_copy_(-1, network.tokens, logits)
