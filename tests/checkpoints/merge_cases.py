"""Random checkpoints and adapters of peft for them: what a merge on disk has to reproduce.

``python -m tests.checkpoints.merge_cases --count 2000 [--seed N]`` judges that many and prints those that do not pass.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import peft
import torch
import transformers as T
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import peftlab
from peftlab.errors import PeftlabError

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
GROUPED = SMALL | {"num_key_value_heads": 2}
DECODER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64,
           "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}  # fmt: skip
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_heads": 4,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A class of models.

    Attributes:
        kind: the class. config: of a small one, for a value of ``tie_word_embeddings``.
        linear: last names of linear maps. embedding, head: those of the embeddings; "" where there is none.
        ignored: names of tensors that the class does not read, which its checkpoints may contain.
        pairs: whether it reads a source and a target text.
    """

    kind: str
    config: Callable[[bool], T.PretrainedConfig]
    linear: tuple[str, ...]
    embedding: str
    head: str = "lm_head"
    ignored: tuple[str, ...] = ("mtp.fc.weight", "mtp.layers.0.norm.weight", "model.visual.proj.weight", "extra.scale")
    pairs: bool = False


def _decoder(
    name: str, linear: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "down_proj"), **fields: object
) -> Family:
    config, kind = getattr(T, f"{name}Config"), f"{name}ForCausalLM"
    return Family(
        kind, lambda tied: config(**{**GROUPED, **fields, "tie_word_embeddings": tied}), linear, "embed_tokens"
    )


FAMILIES = {
    "llama": _decoder("Llama"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma": _decoder("Gemma", head_dim=8),
    "mixtral": _decoder("Mixtral", ("q_proj", "v_proj"), num_local_experts=2, num_experts_per_tok=1),
    "phi3": _decoder("Phi3", ("qkv_proj", "down_proj"), pad_token_id=0),
    "gpt2": Family(
        "GPT2LMHeadModel",
        lambda tied: T.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, tie_word_embeddings=tied),
        ("c_attn", "c_fc"),
        "wte",
    ),
    "opt": Family(
        "OPTForCausalLM",
        lambda tied: T.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, word_embed_proj_dim=32,
            max_position_embeddings=64, pad_token_id=0, tie_word_embeddings=tied,
        ),
        ("q_proj", "fc1"),
        "embed_tokens",
    ),
    "bert": Family(
        "BertForMaskedLM",
        lambda tied: T.BertConfig(**SMALL, max_position_embeddings=64, tie_word_embeddings=tied),
        ("query", "value", "dense"),
        "word_embeddings",
        "decoder",
    ),
    "bert-classifier": Family(
        "BertForSequenceClassification",
        lambda tied: T.BertConfig(**SMALL, max_position_embeddings=64, num_labels=3),
        ("query", "value"),
        "word_embeddings",
        "",
    ),
    "t5": Family("T5ForConditionalGeneration", lambda tied: T.T5Config(**T5, tie_word_embeddings=tied), ("q", "wo"), "shared", pairs=True),
    "mt5": Family("MT5ForConditionalGeneration", lambda tied: T.MT5Config(**T5, tie_word_embeddings=tied), ("q", "v"), "shared", pairs=True),
    "marian": Family("MarianMTModel", lambda tied: T.MarianConfig(**DECODER), ("q_proj", "fc1"), "shared", pairs=True),
    "bart": Family("BartForConditionalGeneration", lambda tied: T.BartConfig(**DECODER), ("q_proj", "fc1"), "shared", pairs=True),
}  # fmt: skip


@dataclass
class Case:
    """One checkpoint and its adapter, as drawn from a seed."""

    seed: int
    family: str
    tied: bool
    stored: str
    grown: int
    ignored: bool
    shards: bool
    dtype: str
    fields: dict[str, object] = field(default_factory=dict)
    ours: bool = False


def draw(seed: int) -> Case:
    """Draw a case; all of it depends on the seed alone."""
    rng = random.Random(seed)
    name = rng.choice(list(FAMILIES))
    family = FAMILIES[name]
    ends = [end for end in (family.embedding, family.head) if end]
    targets: list[str] = rng.sample(family.linear, rng.randint(1, len(family.linear)))
    fields: dict[str, object] = {"r": rng.choice([1, 2, 4]), "lora_alpha": rng.choice([4, 8])}
    what = rng.choice(
        ["plain", "embedding", "head", "both", "save embedding", "save head", "save both", "tokens", "tokens"]
    )
    if name == "marian" and what == "tokens":
        fields["trainable_token_indices"] = [1, 5, 9]
    elif what == "tokens":
        fields["trainable_token_indices"] = sorted(rng.sample(range(60), 3))
    elif what.startswith("save"):
        fields["modules_to_save"] = ends[:1] if what == "save embedding" else ends[-1:] if what == "save head" else ends
    elif what != "plain":
        targets += ends[:1] if what == "embedding" else ends[-1:] if what == "head" else ends
    if rng.random() < 0.25 and what != "plain":
        fields["ensure_weight_tying"] = True
    if rng.random() < 0.2 and what == "plain":
        fields["use_dora"] = True
    if rng.random() < 0.2:
        fields["use_rslora"] = True
    if rng.random() < 0.2 and what == "plain":
        fields["bias"] = rng.choice(["all", "lora_only"])
    fields["target_modules"] = targets
    tied = rng.random() < 0.6
    stored = rng.choice(["once", "once", "twice", "apart"]) if tied and family.head else "once"
    return Case(
        seed=seed,
        family=name,
        tied=tied,
        stored=stored,
        grown=rng.choice([0, 0, 3]),
        ignored=rng.random() < 0.5,
        shards=rng.random() < 0.3,
        dtype=rng.choice(["float32", "float32", "bfloat16"]),
        fields=fields,
        ours=rng.random() < 0.3,
    )


def _inputs(family: Family) -> dict[str, torch.Tensor]:
    ids = torch.arange(2, 62).view(2, 30)
    return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :7]} if family.pairs else {"input_ids": ids}


def _logits(model: nn.Module, family: Family) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().float()(**_inputs(family)).logits


def write_base(case: Case, directory: Path) -> dict[str, torch.Tensor]:
    """Write the base checkpoint; return the tensors in it that its class does not read."""
    family = FAMILIES[case.family]
    torch.manual_seed(case.seed)
    model = getattr(T, family.kind)(family.config(case.tied)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.to(getattr(torch, case.dtype)).save_pretrained(directory, max_shard_size="20KB" if case.shards else "5GB")
    index = directory / "model.safetensors.index.json"
    files = sorted(directory.glob("*.safetensors"))
    file, extra = files[-1], {}
    tensors = load_file(file)
    twin = next(
        (
            t
            for t in (getattr(model, "all_tied_weights_keys", None) or {})
            if t.endswith("head.weight") or t.endswith("decoder.weight")
        ),
        None,
    )
    if case.stored != "once" and twin is not None and twin not in tensors:
        value = model.get_parameter(twin).detach().clone()
        tensors[twin] = value if case.stored == "twice" else torch.randn_like(value) * 0.1
    if case.ignored:
        for n, name in enumerate(family.ignored):
            dtype = (torch.float32, torch.bfloat16, torch.float16, torch.int64)[n % 4]
            extra[name] = (torch.randn(3, 5) * 9).to(dtype)
    save_file(tensors | extra, file, metadata={"format": "pt"})
    if index.exists():
        value = json.loads(index.read_text())
        value["weight_map"] |= dict.fromkeys([*tensors, *extra], file.name)
        index.write_text(json.dumps(value))
    return extra


def _load(case: Case, directory: Path) -> T.PreTrainedModel:
    return getattr(T, FAMILIES[case.family].kind).from_pretrained(directory, dtype=torch.float32).eval()


def _grown(case: Case, model: T.PreTrainedModel) -> T.PreTrainedModel:
    if case.grown:
        torch.manual_seed(case.seed + 1)
        model.resize_token_embeddings(64 + case.grown, mean_resizing=False)
    return model


def judge(case: Case, place: Path) -> str:
    """Return "pass", "peft fails: …", "refused: …" or what is wrong."""
    family = FAMILIES[case.family]
    extra = write_base(case, place / "base")
    try:
        theirs = peft.get_peft_model(
            _grown(case, _load(case, place / "base")), peft.LoraConfig(**deepcopy(case.fields))
        )
        torch.manual_seed(case.seed + 2)
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                # After a resize peft leaves the base's embedding trainable inside its wrapper; it is not the adapter.
                base = name.endswith(("base_layer.weight", "original_module.weight"))
                if parameter.requires_grad and not base:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        expected = _logits(theirs, family)
        theirs.save_pretrained(place / "adapter")
        again = peft.PeftModel.from_pretrained(_grown(case, _load(case, place / "base")), str(place / "adapter"))
        if not torch.allclose(_logits(again, family), expected, rtol=1e-4, atol=1e-4):
            return "peft fails: its own file gives other logits"
        theirs_merged = _logits(again.merge_and_unload(), family)
    except Exception as error:
        return f"peft fails: {type(error).__name__}: {str(error)[:100]}"
    try:
        model = peftlab.load_adapter(_grown(case, _load(case, place / "base")), place / "adapter")
        loaded = _logits(model, family)
        if _differs("loaded", loaded, expected) and not _differs("loaded", loaded, theirs_merged):
            return "peft fails: its adapted and its merged model differ, and ours is the merged one"
        if problem := _differs("loaded", loaded, expected):
            return problem
        adapter = place / "adapter"
        if case.ours:
            adapter = peftlab.save_adapter(model, place / "ours")
        report = peftlab.merge_checkpoint(adapter, place / "base", place / "merged")
    except PeftlabError as error:
        return f"refused: {error}"
    if problem := _differs("merged in memory", _logits(peftlab.merge(model), family), expected):
        return problem
    merged, info = getattr(T, family.kind).from_pretrained(
        place / "merged", dtype=torch.float32, output_loading_info=True
    )
    if info["missing_keys"] or info["mismatched_keys"] or set(info["unexpected_keys"]) - set(extra):
        return f"loading the merged directory: {info}"
    # What is stored in 16 bits is rounded once more by the merge.
    loose = 0.05 if case.dtype == "bfloat16" else 1e-4
    if problem := _differs("merged on disk", _logits(merged, family), expected, loose):
        return problem
    return _bytes(place / "base", place / "merged", report) or "pass"


def _differs(what: str, found: torch.Tensor, expected: torch.Tensor, loose: float = 1e-4) -> str:
    if found.shape != expected.shape:
        return f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    worst = float((found - expected).abs().max() / expected.abs().max().clamp_min(1))
    return f"{what}: differs by {worst:.3g}" if not worst <= loose else ""


def _bytes(base: Path, merged: Path, report: peftlab.MergeReport) -> str:
    """Return what became of a base tensor that the report does not tell."""
    ours: dict[str, torch.Tensor] = {}
    for file in merged.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            ours |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    changed = {row.name for row in report.tensors} | {key for row in report.tensors for key in row.keys}
    accounts, count = report.accounts, 0
    for file in base.glob("*.safetensors"):
        for key, tensor in load_file(file).items():
            count += 1
            if key in changed or key in report.dropped:
                continue
            if key not in ours:
                return f"{key} is lost"
            if ours[key].dtype != tensor.dtype or not torch.equal(
                ours[key].view(torch.uint8), tensor.view(torch.uint8)
            ):
                return f"{key} was changed, and the report does not say so"
    if (accounts.tensors, accounts.changed + accounts.copied + accounts.left_out) != (count, count):
        return f"accounts: {accounts}, {count} tensors"
    return ""


def run(seeds: range) -> dict[str, list[tuple[Case, str]]]:
    """Judge the cases of these seeds; return them by outcome."""
    found: dict[str, list[tuple[Case, str]]] = {}
    for seed in seeds:
        case = draw(seed)
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcome = judge(case, Path(place))
            except Exception:
                outcome = traceback.format_exc()
        kind = next((k for k in ("pass", "refused", "peft fails") if outcome.startswith(k)), "wrong")
        if kind != "pass":
            print(case, outcome, sep="\n  ", flush=True)
        found.setdefault(kind, []).append((case, outcome))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    T.logging.set_verbosity_error()
    T.logging.disable_progress_bar()
    found = run(range(options.seed, options.seed + options.count))
    print(f"seed {options.seed}:", {kind: len(cases) for kind, cases in found.items()})
    sys.exit("wrong" in found)


if __name__ == "__main__":
    main()
