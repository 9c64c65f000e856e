"""Draft directories as their consumers load them, checked by loading them back.

============  =====================================================================================
transformers  a plain directory, for ``generate(assistant_model=...)``
vllm          a plain directory, for the speculative method ``draft_model``
vllm-medusa   ``config.json`` of type medusa and the heads alone, for the method ``medusa``
speculators   a plain directory whose ``config.json`` also describes the speculator and its verifier
============  =====================================================================================
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from peftlab.checkpoints.adapter import CONFIG_FILE, read_adapter
from peftlab.checkpoints.base import load_base, load_config, load_tokenizer
from peftlab.checkpoints.tensorfiles import read_tensors, write_tensors
from peftlab.decoding.medusa import read_medusa
from peftlab.drafting.preflight import check_tokenizers
from peftlab.drafting.vocabulary import reduce_heads
from peftlab.errors import PeftlabError
from peftlab.files import read_object, write_json
from peftlab.methods.medusa import MedusaConfig
from peftlab.methods.medusa_heads import MedusaHeads
from peftlab.outputs import MARK, staged_directory

Consumer = Literal["transformers", "vllm", "vllm-medusa", "speculators"]
CONSUMERS: tuple[str, ...] = ("transformers", "vllm", "vllm-medusa", "speculators")


def export_draft(
    source: str | Path, out: str | Path, consumer: str, target: str, *, gamma: int = 4, overwrite: bool = False
) -> tuple[str, float]:
    """Write a trained draft for ``consumer``, load it back and compare logits.

    Args:
        source: a run directory of a draft recipe, its ``merged/``, or any plain model directory; for
            ``vllm-medusa`` the run, or its adapter.
        target: reference of the model it drafts for. gamma: drafted tokens a step in the printed command.

    Returns:
        How to serve it, and the largest difference of a logit between what was trained and what was written.

    Raises:
        PeftlabError: the consumer cannot load such a draft (nothing is written), or what was written differs.
    """
    if consumer not in CONSUMERS:
        raise PeftlabError(f"--for {consumer}: one of {', '.join(CONSUMERS)}")
    source, out = Path(source), Path(out)
    if consumer == "vllm-medusa":
        return _export_medusa(source, out, target, overwrite)
    plain = _plain(source, consumer)
    config, goal = load_config(str(plain)), load_config(target)
    check_tokenizers(load_tokenizer(target), load_tokenizer(str(plain)), chat=False)
    sizes = [c.get_text_config(decoder=True).vocab_size for c in (goal, config)]
    if sizes[0] != sizes[1]:
        raise PeftlabError(
            f"--for {consumer}: the draft's vocab_size is {sizes[1]}, the target's {sizes[0]}; it would not be loaded. "
            f"model.resize_token_embeddings({sizes[0]}) before training makes them equal"
        )
    inputs: dict[str, str | Path | None] = {"the draft": source, "the target": target}
    with staged_directory(out, "model", overwrite=overwrite, inputs=inputs) as staging:
        for file in plain.iterdir():
            if file.is_file() and file.name not in ("merge.json", MARK):
                shutil.copyfile(file, staging / file.name)
        if consumer == "speculators":
            described = read_object(staging / "config.json") | _speculator(goal, target, gamma)
            write_json(staging / "config.json", described)
        difference = _compare(plain, staging)
    return _command(consumer, out, target, gamma), difference


def write_medusa(model: Any, out: Path, *, tokens: Tensor | None = None, overwrite: bool = False) -> Path:
    """Write the Medusa heads of an injected model as vLLM reads them, and check the round trip key for key.

    Keys are ``blocks.i.layers.j.weight`` (and ``.bias``) and ``lm_heads.i.weight``; for a reduced vocabulary also
    ``token_map``, with ``truncated_vocab_size`` in the configuration. A shared W2 is written once, with
    ``original_lm_head`` in the configuration.

    Args:
        tokens: ids of the reduced vocabulary, [V_d]; None for all.

    Raises:
        PeftlabError: the files do not hold what the model does.
    """
    heads: MedusaHeads = model.get_output_embeddings().medusa_heads
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    return _write_heads(tensors, out, tokens, overwrite)


def _write_heads(tensors: dict[str, Tensor], out: Path, tokens: Tensor | None, overwrite: bool) -> Path:
    count = _count(tensors, "blocks")
    vocab_size, hidden_size = tensors["lm_heads.0.weight"].shape
    if tokens is not None and len(tokens) < vocab_size:
        tensors = reduce_heads(tensors, tokens)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": count,
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(tensors["lm_heads.0.weight"]),
        "medusa_fc_bias": any(name.endswith(".bias") for name in tensors),
        "original_lm_head": _count(tensors, "lm_heads") < count,
    }
    with staged_directory(out, "model", overwrite=overwrite) as staging:
        write_tensors(staging / "model.safetensors", tensors, {"format": "pt"})
        write_json(staging / "config.json", config)
        read_medusa(staging)
        back, _ = read_tensors(staging / "model.safetensors")
        if any(not torch.equal(tensor, back[name]) for name, tensor in tensors.items()):
            raise PeftlabError(f"{out}: what was written is not what was trained; nothing was left behind")
    return out


def _count(tensors: dict[str, Tensor], kind: str) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith(f"{kind}.")})


def _export_medusa(source: Path, out: Path, target: str, overwrite: bool) -> tuple[str, float]:
    if not any((place / CONFIG_FILE).exists() for place in (source, source / "adapter")):
        raise PeftlabError(f"--for vllm-medusa: {source} holds no heads; train some with method: medusa")
    adapter = read_adapter(source)
    marker = ".medusa_heads."
    heads = {name.partition(marker)[2]: t for name, t in adapter.tensors.items() if marker in name}
    if not heads:
        raise PeftlabError(f"--for vllm-medusa: {source} is a {adapter.config.name} draft; export it with --for vllm")
    config = adapter.config
    assert isinstance(config, MedusaConfig)
    own = load_config(target).get_text_config(decoder=True)
    width = len(heads["blocks.0.layers.0.weight"])
    rows = own.vocab_size if config.shared_head else len(heads["lm_heads.0.weight"])
    if (own.vocab_size, own.hidden_size) != (rows, width):
        raise PeftlabError(
            f"--for vllm-medusa: the heads are of {rows} tokens and width {width}, {target} has {own.vocab_size} and "
            f"{own.hidden_size}"
        )
    known = source / "heads" / "model.safetensors"
    tokens = read_tensors(known)[0].get("token_map") if known.exists() else None
    model, _ = load_base(target, "AutoModelForCausalLM")
    lm_head = model.get_output_embeddings().weight
    if config.shared_head:
        heads["lm_heads.0.weight"] = lm_head.detach()
    trained = MedusaHeads(lm_head, config.heads, config.bias, config.shared_head)
    trained.load_state_dict(heads)
    _write_heads(heads, out, tokens, overwrite)
    hidden = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own_logits, written = trained(hidden), read_medusa(out)(hidden)
        difference = float((own_logits - written)[written.isfinite()].abs().max())
    served = str(source / "merged") if config.trunk is not None else target
    return _serve(served, {"method": "medusa", "model": str(out), "num_speculative_tokens": config.heads}), difference


def _plain(source: Path, consumer: str) -> Path:
    found = next((p for p in (source / "merged", source) if (p / "config.json").exists()), None)
    if found is None:
        raise PeftlabError(
            f"--for {consumer}: {source} holds no plain model directory (no merged/ and no config.json); drafts of "
            "methods without a linear fold, and heads, cannot be loaded there (heads: --for vllm-medusa)"
        )
    kind = read_object(found / "config.json").get("model_type")
    if kind == "medusa":
        raise PeftlabError(f"--for {consumer}: {found} holds Medusa heads, not a model; use --for vllm-medusa")
    return found


@torch.no_grad()
def _compare(source: Path, written: Path) -> float:
    ids = torch.arange(1, 17)[None]
    answers = []
    for place in (source, written):
        model, fresh = load_base(str(place), "AutoModelForCausalLM")
        if fresh:
            raise PeftlabError(f"{place}: lacks {', '.join(fresh[:5])}")
        answers.append(model(input_ids=ids % model.config.vocab_size).logits)
    difference = float((answers[0] - answers[1]).abs().max())
    if difference > 0:
        raise PeftlabError(f"{written}: answers other logits than {source} (by {difference:.2g}); nothing was written")
    return difference


def _speculator(goal: Any, target: str, gamma: int) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": gamma,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": target, "architectures": list(goal.architectures or [])}
    return {
        "speculators_model_type": "independent",
        "speculators_config": {
            "algorithm": "independent",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
    }


def _command(consumer: str, out: Path, target: str, gamma: int) -> str:
    if consumer == "transformers":
        return (
            "from transformers import AutoModelForCausalLM\n"
            f"target = AutoModelForCausalLM.from_pretrained({target!r})\n"
            f"draft = AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
            "target.generate(**inputs, assistant_model=draft)  # batches of one"
        )
    return _serve(target, {"method": "draft_model", "model": str(out), "num_speculative_tokens": gamma})


def _serve(target: str, speculative: dict[str, Any]) -> str:
    return f"vllm serve {target} --speculative-config '{json.dumps(speculative)}'"
