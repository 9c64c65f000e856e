"""Who reads which adapter: ``peftlab adapter check``, and ``peftlab adapter convert`` for an engine.

Each program that reads adapters is a class with settings and one method, ``verdicts``, which goes through what decides
in the order in which the program looks at it; its first verdict counts. peftlab and (but for a plain LoRA) peft are
asked by loading the adapter into a model without weights; the engines' rules are derived from a named version of their
source. Where a rule does not cover an adapter (another architecture, say) the verdict is "unknown", never a guess.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from peftlab.checkpoints.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    load_adapter,
    read_adapter,
    text_or_none,
)
from peftlab.checkpoints.adapter_contents import (
    SINGLE_EXPERTS,
    AdapterContents,
    AdapterFit,
    AdapterTensor,
    fit_to_base,
    read_contents,
    single_expert,
    split_experts,
)
from peftlab.checkpoints.gguf import GgufBase, GgufModel, write_lora
from peftlab.checkpoints.merge_plan import MergeOptions, plan_merge, task_model
from peftlab.checkpoints.peft_format import PREFIX, lost_start
from peftlab.checkpoints.tensors import write_tensors
from peftlab.environment import version_of
from peftlab.errors import PeftlabError, did_you_mean, reason
from peftlab.files import staged_directory, staged_file, write_json
from peftlab.methods.config import METHODS, LoraConfig
from peftlab.methods.lora.plan import NEEDS_BASE
from peftlab.models.config import model_place
from peftlab.models.load import load_config, tied_names
from peftlab.untyped import LoadedKeys

# Values of init_lora_weights with which the file's factors are the whole update.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

# Last names of the linear maps in models of Llama's form, in those with fused projections, and of what is no layer.
_ATTENTION = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
_LLAMA = _ATTENTION | {"gate_proj", "up_proj", "down_proj"}
_FUSED = frozenset(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
_EMBEDDINGS = frozenset(("embed_tokens", "lm_head"))


def _causal(families: str, layers: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return ``layers`` for the language model class of each of several families, named with spaces between."""
    return {f"{family}ForCausalLM": layers for family in families.split()}


@dataclass(frozen=True)
class Verdict:
    """Whether a program reads an adapter as it was trained, and why.

    Attributes:
        loads: ``True``: as meant, with the settings that ``reason`` names; ``False``: refused, or read as something
            else; ``"unknown"``: there is no rule.
        reason: what decides.
    """

    loads: bool | Literal["unknown"]
    reason: str


class Reader:
    """A program that reads adapters.

    Attributes:
        source: the version that the verdicts are derived from, and its files; ``{peft}`` is the installed version.
        date: the day of that version; empty where the program itself is asked today.
    """

    source: ClassVar[str]
    date: ClassVar[str] = ""

    def verdict(self, fit: AdapterFit) -> Verdict:
        """Return what the program makes of an adapter."""
        return next(self.verdicts(fit))

    def verdicts(self, fit: AdapterFit) -> Iterator[Verdict]:
        """Yield verdicts in the order in which the program looks at an adapter; the first one counts."""
        raise NotImplementedError


class Peftlab(Reader):
    """peftlab plans what ``peftlab merge`` would do, and loads into the empty model what does not merge."""

    source = "peftlab {peftlab}, by planning what it would do"

    def verdicts(self, fit: AdapterFit) -> Iterator[Verdict]:
        path, source = fit.contents.path, str(fit.contents.path)
        # alpha scales a loralib file and decides nothing here.
        alpha = 1.0 if fit.contents.format == "loralib" else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                adapter = read_adapter(path, lora_alpha=alpha)
                name, unmerged = adapter.config.name, ""
                if METHODS[name].folds:
                    try:
                        plan_merge(adapter, fit.base, MergeOptions(), source=source).close()
                    except PeftlabError as error:
                        unmerged = str(error)
                else:
                    unmerged = f"method {name} does not merge"
                if unmerged:
                    load_adapter(task_model(adapter, fit.base, source=source), adapter)
        except PeftlabError as error:
            yield Verdict(False, str(error))
            return
        loads = f"loads; {unmerged}" if unmerged else "loads and merges"
        yield Verdict(True, "; ".join((loads, *adapter.notes)))


class Peft(Reader):
    """The installed peft loads the adapter into the empty model.

    A plain LoRA, which any peft reads, is judged by its keys and shapes: loading peft takes longer than all else.
    """

    source = "peft {peft}, by loading it; a plain LoRA by its keys and shapes"

    def verdicts(self, fit: AdapterFit) -> Iterator[Verdict]:
        if importlib.util.find_spec("peft") is None:
            yield Verdict("unknown", "peft is not installed")
        if fit.contents.format != "peft":
            yield Verdict(False, f"peft reads its own format alone, not {fit.contents.format}'s")
        if lost := lost_start(fit.contents.raw.get("init_lora_weights")):
            yield Verdict(False, lost)
        if fit.plain:
            yield Verdict(True, "every tensor has its place")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                missing, unexpected = self._load(fit, str(fit.contents.path))
        except Exception as error:  # peft raises anything for what it does not expect
            yield Verdict(False, f"peft refuses it: {reason(error)}")
            return
        if unexpected:
            yield Verdict(False, f"peft leaves out, silently: {_shortened(unexpected)}")
        if missing:
            yield Verdict(False, f"peft leaves as they start: {_shortened(missing)}")
        yield Verdict(True, "every tensor has its place")

    def _load(self, fit: AdapterFit, path: str) -> tuple[list[str], list[str]]:
        """Return the adapter's parameters that the file lacks, and the file's keys that peft has no place for."""
        import peft

        config = peft.PeftConfig.from_pretrained(path)
        if isinstance(getattr(config, "init_lora_weights", None), str):
            # Such a start needs the base's weights, which are not here; names and shapes do not depend on it.
            config.init_lora_weights = True
        model = peft.get_peft_model(fit.fresh_model(), config, low_cpu_mem_usage=True)
        weights = peft.utils.load_peft_weights(path, device="cpu")
        found: LoadedKeys = peft.set_peft_model_state_dict(model, weights, low_cpu_mem_usage=True)
        missing = [key for key in found.missing_keys if "lora_" in key or ".modules_to_save." in key]
        return missing, list(found.unexpected_keys)


class Engine(Reader):
    """An engine that serves LoRA adapters in peft's format.

    Attributes:
        title: what messages call it.
        serve: how to serve a converted directory; ``{rank}`` is its rank.
        layers: by model class, the last names of the layers that take LoRA.
        ignored: options of peft's that change what the factors mean and that the engine does not look at.
        reads_embeddings: whether it reads factors of embeddings.
        reads_experts: whether it reads factors expert by expert.
    """

    title: ClassVar[str]
    serve: ClassVar[str]
    layers: ClassVar[Mapping[str, frozenset[str]]]
    ignored: ClassVar[tuple[str, ...]] = ()
    reads_embeddings: ClassVar[bool] = True
    reads_experts: ClassVar[bool] = True

    def rank(self, rank: int) -> int:
        """Return the rank to which the factors of a converted adapter are padded."""
        return rank

    def required_modules(self, modules: Iterable[str], adapted: Collection[str]) -> list[str]:
        """Return the modules without whose factors the engine does not read those of others.

        Args:
            modules: names of the model's modules. adapted: those with factors.
        """
        return []

    def _no(self, why: str) -> Verdict:
        return Verdict(False, f"{self.title} {why}")

    def _not_lora(self, fit: AdapterFit) -> Iterator[Verdict]:
        """Yield verdicts on what is no LoRA of peft's, or does not fit the base."""
        contents = fit.contents
        if contents.format != "peft":
            yield self._no(f"reads peft's format alone, not {contents.format}'s")
        if contents.raw.get("peft_type") != "LORA":
            yield self._no(f"reads LoRA alone, not peft_type {contents.raw.get('peft_type')}")
        if fit.unmatched:
            yield Verdict(False, f"the base does not fit: {_shortened(fit.unmatched.values())}")

    def _ignored_options(self, fit: AdapterFit) -> Iterator[Verdict]:
        """Yield verdicts on options that change what the factors mean and that the engine does not look at."""
        raw = fit.contents.raw
        for key in self.ignored:
            if raw.get(key):
                yield self._no(f"does not look at {key}, so the model would compute something else")
        start = raw.get("init_lora_weights", True)
        if (start.lower() if isinstance(start, str) else start) not in _PLAIN_STARTS:
            yield self._no(f"does not look at init_lora_weights={start!r}, which subtracts a part of the base")

    def _other_scale(self, contents: AdapterContents, applied: Callable[[int], float]) -> Iterator[Verdict]:
        """Yield a verdict where the engine's scaling, a function of a module's rank, is not the one of training."""
        for pair in contents.pairs:
            scaling, trained = applied(contents.rank(pair)), contents.scale(pair)
            if not math.isclose(scaling, trained, rel_tol=1e-6):
                yield self._no(f"would scale {pair.module} by {scaling:g}, it was trained with {trained:g}")


class Vllm(Engine):
    """vLLM applies the scaling of each module and takes few ranks and layers."""

    title = "vLLM"
    source = (
        "vLLM 0.33.0: vllm/lora/peft_helper.py, lora_model.py, lora_weights.py, model_manager.py, utils.py, "
        "layers/fused_moe.py, model_executor/models/"
    )
    date = "2026-11-02"
    serve = "serve with --enable-lora --max-lora-rank {rank}"
    layers: ClassVar[Mapping[str, frozenset[str]]] = {
        **_causal("Llama Qwen3 Granite", _LLAMA | _EMBEDDINGS),
        **_causal("Mistral Qwen2 Gemma Gemma2 Gemma3", _LLAMA),
        **_causal("Phi3", _FUSED),
        **_causal("Qwen2Moe GptOss", _ATTENTION),
        **_causal("Qwen3Moe Mixtral", _ATTENTION | _EMBEDDINGS),
    }
    mixtures = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM")
    fused_experts = ("GptOssForCausalLM",)  # read peft's factors of all experts in one tensor without further settings
    single_experts = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM")  # and those of each expert
    renamed_experts: ClassVar[Mapping[str, str]] = {"MixtralForCausalLM": "block_sparse_moe.experts"}
    refused = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")
    heads = ("classifier", "score")  # what may be trained whole, in models that classify
    ranks = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    default_rank = 16

    def verdicts(self, fit: AdapterFit) -> Iterator[Verdict]:
        contents, raw = fit.contents, fit.contents.raw
        yield from self._not_lora(fit)
        for key in ("r", "lora_alpha", "target_modules"):
            if key not in raw:
                yield self._no(f"refuses a configuration without {key}")
        for key in self.refused:
            if raw.get(key):
                yield self._no(f"refuses {key}")
        if other := [name for name in contents.names("modules_to_save") if name not in self.heads]:
            yield self._no(f"refuses modules_to_save={other}")
        if raw.get("bias", "none") != "none":
            yield self._no(f"refuses bias={raw['bias']}")
        start = raw.get("init_lora_weights", True)
        if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
            yield self._no(f"refuses init_lora_weights={start!r}")
        if unread := [tensor.key for tensor in contents.tensors if not self._parses(tensor)]:
            yield self._no(f"refuses keys that are no factors: {_shortened(unread)}")
        if fit.architecture not in self.layers:
            yield Verdict("unknown", f"no rule for {fit.architecture}")
        if whole := [tensor.key for tensor in contents.tensors if tensor.kind == "whole"]:
            yield self._no(f"refuses {whole[0]} in a model that does not classify")

        depths: dict[str, set[int]] = {}  # of factors of all experts in one tensor, by module
        for pair in contents.pairs:
            if fit.all_experts(pair):
                depths.setdefault(pair.module, set()).add(pair.depth)
            elif fit.architecture in self.single_experts and single_expert(fit.architecture, pair.module):
                if incomplete := fit.incomplete_experts():
                    yield self._no(f"needs factors of every matrix of every expert of {incomplete}")
            elif pair.last not in self.layers[fit.architecture] and fit.architecture in self.mixtures:
                yield Verdict("unknown", f"no rule for {pair.module} of {fit.architecture}")
            elif pair.last not in self.layers[fit.architecture]:
                yield Verdict(False, f"vLLM's {fit.architecture} takes no LoRA on {pair.module}")
        flags = []
        if depths:
            if theirs := self.renamed_experts.get(fit.architecture):
                module = next(iter(depths))
                yield self._no(f"calls the experts {theirs} and would leave the factors of {module} out, silently")
            if alone := [module for module, each in depths.items() if each != {0, 1}]:
                yield self._no(f"needs factors of both gate_up_proj and down_proj of {alone[0]}")
            if fit.architecture not in self.fused_experts:
                flags.append("--enable-mixed-moe-lora-format and is_3d_lora_weight=True in the request")
        highest = max([contents.r, *contents.pattern("rank_pattern").values()])
        if highest > self.ranks[-1]:
            yield Verdict(False, f"vLLM's highest rank is {self.ranks[-1]}, this adapter's {highest}")
        if highest > self.default_rank:
            flags.insert(0, f"--max-lora-rank {min(rank for rank in self.ranks if rank >= highest)}")
        yield Verdict(True, f"with {' and '.join(flags)}" if flags else "scaling of each module included")

    def _parses(self, tensor: AdapterTensor) -> bool:
        """Return whether vLLM's reader takes a key: a factor, a head, or a base's embedding, which it leaves out."""
        if tensor.kind == "base":
            return tensor.key.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight"))
        if tensor.kind == "whole":
            return tensor.module.rpartition(".")[2] in self.heads and tensor.parameter in ("weight", "bias")
        return tensor.kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class SGLang(Engine):
    """SGLang takes one rank and one scaling, and reads some projections only together."""

    title = "SGLang"
    source = "SGLang 0.5.23: sglang/srt/lora/lora.py, lora_config.py, lora_manager.py, mem_pool.py, utils.py"
    date = "2026-10-30"
    serve = "serve with --enable-lora --lora-paths NAME=DIR"
    layers: ClassVar[Mapping[str, frozenset[str]]] = {
        **_causal("Llama Mistral Qwen2 Qwen3", _LLAMA | _EMBEDDINGS),
        **_causal("Gemma Gemma2 Gemma3 Granite Qwen3Moe", _LLAMA),
    }
    ignored = ("lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")
    # A projection is read only with these others of the same layer: they share one matrix in the engine.
    partners: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "q_proj": ("v_proj",), "k_proj": ("q_proj", "v_proj"), "v_proj": ("q_proj",), "up_proj": ("gate_proj",),
    }  # fmt: skip

    def verdicts(self, fit: AdapterFit) -> Iterator[Verdict]:
        contents = fit.contents
        yield from self._not_lora(fit)
        if contents.raw.get("use_dora"):
            yield self._no("refuses use_dora")
        targets = contents.raw.get("target_modules")
        if not targets or (isinstance(targets, str) and targets not in ("all", "all-linear")):
            yield self._no(f"refuses target_modules={targets!r}: it needs a list of names, or all-linear")
        if "added_tokens.json" in contents.files:
            yield Verdict("unknown", "SGLang refuses adapters whose added_tokens.json has tokens the base lacks")
        yield from self._ignored_options(fit)
        if dropped := contents.other_tensors:
            yield self._no(f"reads no tensor but factors: {_shortened(tensor.key for tensor in dropped)}")
        if together := [pair.module for pair in contents.pairs if fit.all_experts(pair)]:
            yield self._no(f"reads factors expert by expert; those of {together[0]} are in one tensor for all experts")
        if fit.architecture not in self.layers:
            yield Verdict("unknown", f"no rule for {fit.architecture}")
        if incomplete := fit.incomplete_experts():
            yield Verdict("unknown", f"no rule for experts of {incomplete} without factors")
        for pair in contents.pairs:
            if pair.last not in self.layers[fit.architecture]:
                yield Verdict(False, f"SGLang's {fit.architecture} takes no LoRA on {pair.module}")
            if pair.a[0] != contents.r:
                yield self._no(f"needs rank r={contents.r} everywhere; {pair.module} has {pair.a[0]}")
        scaling = contents.lora_alpha / contents.r
        yield from self._other_scale(contents, lambda rank: scaling)
        for module, partner in self._lone_projections({pair.module for pair in contents.pairs}):
            last = module.rpartition(".")[2]
            yield self._no(f"reads {last} only beside {partner} of the same layer: {module}")
        yield Verdict(True, "rank r and scaling lora_alpha / r everywhere")

    def _lone_projections(self, adapted: Collection[str]) -> list[tuple[str, str]]:
        """Return the modules that lack a partner without which they are not read, and the partner's last name."""
        return [
            (module, partner)
            for module in sorted(adapted)
            for partner in self.partners.get(module.rpartition(".")[2], ())
            if f"{module.rpartition('.')[0]}.{partner}" not in adapted
        ]

    def required_modules(self, modules: Iterable[str], adapted: Collection[str]) -> list[str]:
        return [f"{module.rpartition('.')[0]}.{partner}" for module, partner in self._lone_projections(adapted)]


class LlamaCpp(Engine):
    """llama.cpp converts an adapter to GGUF by a script that knows factors by name alone."""

    title = "llama.cpp"
    source = (
        "llama.cpp 0c1e57098, as in llama-cpp-python 0.3.36: convert_lora_to_gguf.py, conversion/, "
        "src/llama-adapter.cpp, src/llama-graph.cpp"
    )
    date = "2026-10-01"
    serve = "convert with convert_lora_to_gguf.py (or write the file here: -o FILE.gguf), then --lora FILE"
    layers: ClassVar[Mapping[str, frozenset[str]]] = {
        **_causal("Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Granite SmolLM3 Mixtral Qwen2Moe Qwen3Moe", _LLAMA),
        **_causal("Phi3", _FUSED),
    }
    without_head = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")  # their output layer is left out
    ignored = ("lora_bias", "layer_replication", "use_bdlora", "use_qalora")

    def verdicts(self, fit: AdapterFit) -> Iterator[Verdict]:
        contents = fit.contents
        yield from self._not_lora(fit)
        yield from self._ignored_options(fit)
        others = [tensor.key for tensor in contents.other_tensors]
        if norms := [key for key in others if "_layernorm" in key or ".norm" in key]:
            yield self._no(f"converts trained norms and leaves them out when it loads: {_shortened(norms)}")
        if others:
            yield Verdict(False, f"llama.cpp's converter refuses keys that are no factors: {_shortened(others)}")
        if together := [pair.module for pair in contents.pairs if fit.all_experts(pair)]:
            where = f"{together[0]}, whose factors are in one tensor for all experts"
            yield Verdict(False, f"llama.cpp's converter has no name for {where}")
        if fit.architecture == "GPT2LMHeadModel" and contents.pairs:
            yield Verdict(
                False, "llama.cpp's converter transposes the factors of GPT-2's layers, which exchanges A and B"
            )
        if fit.architecture not in self.layers:
            yield Verdict("unknown", f"no rule for {fit.architecture}")
        if incomplete := fit.incomplete_experts():
            yield Verdict(False, f"llama.cpp's converter needs factors of every matrix of every expert of {incomplete}")
        known = self.layers[fit.architecture] | _EMBEDDINGS
        for pair in contents.pairs:
            if pair.last not in known and single_expert(fit.architecture, pair.module) is None:
                yield Verdict(False, f"llama.cpp's converter has no name for {pair.module} of {fit.architecture}")
            if pair.last == "lm_head" and fit.architecture in self.without_head:
                yield self._no(f"leaves lm_head of {fit.architecture} out, silently")
            if pair.last == "lm_head" and tied_names(fit.model):
                yield self._no("has no output layer of its own where it is tied to the embeddings")
        # alpha / rank, with each tensor's own rank; patterns and rsLoRA are not looked at.
        yield from self._other_scale(contents, lambda rank: contents.lora_alpha / rank)
        yield Verdict(True, "scaling lora_alpha / rank of each module")


class Lorax(Engine):
    """LoRAX reads a kind of layer only if every layer has it, and pads ranks."""

    title = "LoRAX"
    source = "LoRAX a7394ba: server/lorax_server/adapters/lora.py, models/model.py, models/flash_*.py"
    date = "2026-05-28"
    serve = "pass the directory as adapter_id with adapter_source=local"
    layers: ClassVar[Mapping[str, frozenset[str]]] = {
        **_causal("Llama Mistral Qwen2", _LLAMA | {"lm_head"}),
        **_causal("Gemma Gemma2", _LLAMA),
        **_causal("Phi3", _FUSED),
    }
    ignored = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication")
    reads_embeddings = False
    reads_experts = False

    def verdicts(self, fit: AdapterFit) -> Iterator[Verdict]:
        contents = fit.contents
        yield from self._not_lora(fit)
        yield from self._ignored_options(fit)
        dropped = [
            tensor.key
            for tensor in contents.tensors
            if tensor.kind not in ("lora_A", "lora_B") and (tensor.kind, tensor.parameter) != ("base", "weight")
        ]
        dropped += [pair.module for pair in contents.pairs if fit.all_experts(pair)]
        known = self.layers.get(fit.architecture, frozenset())
        if not dropped and not known:
            yield Verdict("unknown", f"no rule for {fit.architecture}")
        if dropped := dropped or [pair.module for pair in contents.pairs if pair.last not in known]:
            yield self._no(f"leaves these out, with a warning in its log: {_shortened(dropped)}")
        ranks: dict[str, set[int]] = {}
        for pair in contents.pairs:
            ranks.setdefault(pair.last, set()).add(pair.a[0])
        if uneven := [last for last, each in ranks.items() if len(each) > 1]:
            yield self._no(f"needs one rank in all layers' {uneven[0]}; there are {sorted(ranks[uneven[0]])}")
        if gaps := self.required_modules(fit.modules, {pair.module for pair in contents.pairs}):
            yield self._no(f"leaves all {gaps[0].rpartition('.')[2]} out where one layer lacks it: {gaps[0]}")
        rank = contents.r
        if len(ranks) > 1 and self.rank(rank) != rank:
            # Padding changes the rank that the next kinds of layer are scaled by.
            yield self._no(f"pads rank {rank} to {self.rank(rank)} and then scales by the padded rank")
        scaling = contents.lora_alpha / (math.sqrt(rank) if contents.raw.get("use_rslora") else rank)
        yield from self._other_scale(contents, lambda rank: scaling)
        yield Verdict(True, f"scaling {scaling:g} everywhere")

    def rank(self, rank: int) -> int:
        """Return the rank that LoRAX's kernels pad to: at least 8, above that a multiple of 16."""
        return 8 if rank <= 8 else -(-rank // 16) * 16

    def required_modules(self, modules: Iterable[str], adapted: Collection[str]) -> list[str]:
        """Return the modules of other layers that are called as an adapted one and have no factors."""
        kinds = {name.rpartition(".")[2] for name in adapted}
        return [name for name in modules if name.rpartition(".")[2] in kinds and name not in adapted]


def _shortened(names: Iterable[str], n: int = 3) -> str:
    """Return the first few of a list, and how many more there are."""
    every = list(names)
    return ", ".join(every[:n]) + (f", and {len(every) - n} more" if len(every) > n else "")


ENGINES: dict[str, Engine] = {"vllm": Vllm(), "sglang": SGLang(), "llama.cpp": LlamaCpp(), "lorax": Lorax()}
READERS: dict[str, Reader] = {"peftlab": Peftlab(), "peft": Peft(), **ENGINES}


def engine_name(name: str) -> str:
    """Return the engine that ``name`` means, however its letters and dots are written (vLLM, llama.cpp, llamacpp).

    Raises:
        PeftlabError: there is none; the nearest name is in the message.
    """
    plain = {each.replace(".", ""): each for each in ENGINES}
    found = plain.get(name.lower().replace(".", ""))
    if found is None:
        raise PeftlabError(f"no engine {name!r}{did_you_mean(name, ENGINES)}: one of {', '.join(ENGINES)}")
    return found


# What check_adapter's settings leave out: keys that say nothing about the adapter, and values that mean "off".


@dataclass(frozen=True)
class Reading(Verdict):
    """What one program makes of an adapter.

    Attributes:
        source, date: the version of the program with its files, and its day, as in ``Reader``.
    """

    source: str
    date: str


@dataclass(frozen=True)
class AdapterCheck:
    """What ``check_adapter`` found; the JSON has the same keys.

    Attributes:
        adapter, base: what was compared. format: ``peft``, ``peftlab``, ``adapterhub`` or ``loralib``.
        settings: rank, alpha, targets and the options that are on, as the file has them.
        architecture: the class of the model the adapter belongs to.
        matched: the base's modules that it would change.
        unmatched: what the file has and the base does not.
        missing: modules that its configuration targets and its file has no tensors for.
        notes: the reasons, and targets that match nothing.
        consumers: what each program makes of it.
    """

    adapter: str
    base: str
    format: str
    settings: Mapping[str, object]
    architecture: str
    matched: list[str]
    unmatched: list[str]
    missing: list[str]
    notes: list[str]
    consumers: dict[str, Reading]


def check_adapter(source: str | Path, base: str | None = None) -> AdapterCheck:
    """Return what an adapter's files are, what they would touch in a base, and which programs read them as meant.

    Of the base only headers are read: the model has no weights. peft (but for a plain LoRA) and peftlab are asked by
    loading the adapter into it, the engines by rules that were derived from a named version of their source.

    Args:
        source: an adapter directory of peft's, peftlab's or AdapterHub's, a run directory, or loralib's file.
        base: reference of the base model; default: the one that the adapter names.

    Raises:
        PeftlabError: there is no adapter or no base, a file is damaged, or the base is another model.
    """
    contents = read_contents(source)
    named = ("base_model_name_or_path", "model_name")  # AdapterHub's
    own = (text_or_none(contents.raw, key, contents.path / CONFIG_FILE) for key in named)
    reference = base or next(filter(None, own), None)
    if not reference:
        raise PeftlabError(f"{source} names no base model; pass one (--base)")
    fit = fit_to_base(contents, reference)
    notes = list(fit.unmatched.values())
    notes += [f"target_modules: {name!r} matches no module of {fit.architecture}" for name in fit.unmatched_targets]
    notes += [f"{name} is targeted, and the file has no tensors for it" for name in fit.missing]
    versions = {name: version_of(name) or "(not installed)" for name in ("peft", "peftlab")}
    consumers = {}
    for name, reader in READERS.items():
        verdict = reader.verdict(fit)
        consumers[name] = Reading(verdict.loads, verdict.reason, reader.source.format(**versions), reader.date)
    return AdapterCheck(
        adapter=str(source),
        base=reference,
        format=contents.format,
        settings=contents.settings,
        architecture=fit.architecture,
        matched=fit.matched,
        unmatched=sorted(fit.unmatched),
        missing=fit.missing,
        notes=notes,
        consumers=consumers,
    )


Factors = dict[str, tuple[Tensor, Tensor]]
"""A (r, in) and B (out, r) with the scaling in it, by module."""

_A_SUFFIXES = ("_lora_A", ".lora_A", ".lora_embedding_A")


@dataclass(frozen=True)
class Conversion:
    """What ``convert_adapter`` wrote.

    Attributes:
        out: the directory. engine: whom it is for. rank: of all factors. modules: how many have factors.
        added: modules that got factors of 0. serve: how the engine is told to use it.
        checked: what the engine's rule says of the result.
    """

    out: str
    engine: str
    rank: int
    modules: int
    added: list[str]
    serve: str
    checked: str


def convert_adapter(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    base: str | None = None,
    lora_alpha: float | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Write a LoRA adapter as an engine reads it, and check the result by that engine's rule (``check_adapter``).

    Each B is multiplied by its module's scaling and all factors are padded with zeros to one rank, so that with
    ``lora_alpha`` = ``r`` the one scaling is 1: rank and alpha patterns, rsLoRA and parts of fused projections become
    plain LoRA. What an engine needs besides is added: factors of 0 for projections that it reads only together, or
    factors expert by expert.

    Args:
        source: an adapter of peft's, peftlab's or AdapterHub's, or loralib's file.
        out: the directory to write; for llama.cpp also a file whose name ends in .gguf, which it loads by itself.
        to: ``"vllm"``, ``"sglang"``, ``"llama.cpp"`` or ``"lorax"``.
        base: reference of the base model; default: the one that the adapter names. Without a base that is here,
            nothing is added and the result is not checked.
        lora_alpha: α of a loralib file, which does not contain it.
        overwrite: whether to replace ``out``.

    Raises:
        PeftlabError: the adapter contains what the engine does not read (DoRA, a module trained whole, biases, ...),
            named; or ``out`` exists. Nothing is written.
    """
    name = engine_name(to)
    engine = ENGINES[name]
    adapter = read_adapter(source, lora_alpha=lora_alpha)
    config = _plain_lora(adapter, name, source)
    if Path(out).suffix == ".gguf":
        return _write_gguf(source, Path(out), name, adapter, config, base, overwrite=overwrite)
    fit = _fit_or_none(source, base or adapter.base_reference, given=base is not None)
    factors, experts = _scaled(adapter, config, source)
    if not factors and not experts:
        raise PeftlabError(f"{source} contains no factors")
    for parameter, (a, b) in experts.items():
        if fit is None:
            raise PeftlabError(
                f"{source}: {parameter} has experts, which are named as the base needs it; name it with --base"
            )
        if fit.architecture not in SINGLE_EXPERTS or not engine.reads_experts:
            raise PeftlabError(
                f"{source}: {name} reads no factors of {parameter} of {fit.architecture} that this knows to write; "
                "merge the adapter instead"
            )
        factors |= split_experts(fit.architecture, parameter, a, b, fit.shapes[parameter][0])
    added: Factors = {}
    if fit is not None:
        for module in engine.required_modules(fit.modules, factors):
            if module in fit.modules:
                d_out, d_in = fit.shapes[f"{module}.weight"]
                added[module] = torch.zeros(1, d_in), torch.zeros(d_out, 1)
    rank = engine.rank(max(a.shape[0] for a, _ in factors.values()))
    inputs = {"the adapter": Path(source), "the base model": fit.base if fit else None}
    with staged_directory(out, "adapter", overwrite=overwrite, inputs=inputs) as staging:
        _write(staging, factors | added, rank, adapter, fit)
        checked = "unchecked: the base model is not here; name it with --base"
        if fit is not None:
            verdict = engine.verdict(fit_to_base(read_contents(staging), str(fit.base)))
            if verdict.loads is False:
                raise PeftlabError(f"{source} cannot be written for {name}: {verdict.reason}; merge it instead")
            checked = "unchecked: " + verdict.reason if verdict.loads == "unknown" else verdict.reason
    serve = engine.serve.format(rank=rank)
    return Conversion(str(out), name, rank, len(factors) + len(added), sorted(added), serve, checked)


def _write_gguf(
    source: str | Path,
    out: Path,
    name: str,
    adapter: Adapter,
    config: LoraConfig,
    base: str | None,
    *,
    overwrite: bool,
) -> Conversion:
    """Write an adapter as the GGUF file that llama.cpp loads; arguments as for ``convert_adapter``."""
    if name != "llama.cpp":
        raise PeftlabError(f"{out}: {name} reads adapters from directories; name one (-o DIR)")
    reference = base or adapter.base_reference
    if not reference:
        raise PeftlabError(
            f"{source} names no base model, whose matrices llama.cpp calls otherwise; name it with --base"
        )
    factors, experts = _scaled(adapter, config, source)
    if experts:
        raise PeftlabError(
            f"{source}: {name} cannot express factors of {next(iter(experts))}; merge the adapter instead"
        )
    if not factors:
        raise PeftlabError(f"{source} contains no factors")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    base_config = load_config(reference, revision=adapter.revision if base is None else None)
    kinds = base_config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(base_config.model_type, "AutoModel")]
    class_name, stored = str(adapter.base.get("architecture") or kinds[0]), None
    if reference.endswith(".gguf"):
        stored = GgufBase(model_place(reference))
    else:
        fit = _fit_or_none(source, reference, given=True)
        class_name = fit.architecture if fit is not None else class_name
    inputs = {"the adapter": Path(source), "the base model": Path(reference)}
    with staged_file(out, overwrite=overwrite, inputs=inputs) as staging:
        rank = write_lora(staging / out.name, GgufModel(base_config, class_name), factors, out.stem, stored)
    serve = f"serve with llama-server -m BASE.gguf --lora {out}"
    return Conversion(str(out), name, rank, len(factors), [], serve, "alpha / rank is 1 for each pair of factors")


def _plain_lora(adapter: Adapter, name: str, source: str | Path) -> LoraConfig:
    """Return the configuration of an adapter that is plain factors; refuse any other."""
    config = adapter.config
    if not isinstance(config, LoraConfig):
        raise PeftlabError(f"{source}: {name} reads only LoRA, not method {config.name}; merge it instead")
    if config.use_dora:
        raise PeftlabError(f"{source}: {name} cannot express use_dora; merge the adapter instead")
    if config.start:
        raise PeftlabError(f"{source}: {name} cannot express init_lora_weights={config.start}: {NEEDS_BASE}")
    for tensor in adapter.tensors:
        factor = tensor.endswith((*_A_SUFFIXES, "_lora_B", ".lora_B", ".lora_embedding_B"))
        of_base = ".base_layer." in tensor  # a value of the base
        embedding = "lora_embedding_" in tensor and not ENGINES[name].reads_embeddings
        if not (factor or of_base) or embedding:
            raise PeftlabError(f"{source}: {name} cannot express {tensor}; merge the adapter instead")
    return config


def _fit_or_none(source: str | Path, reference: str | None, *, given: bool) -> AdapterFit | None:
    """Return the adapter compared with its base; None if no base was named and the adapter's own is not here."""
    if not reference:
        return None
    try:
        fit = fit_to_base(read_contents(source), reference)
    except PeftlabError:
        if given:
            raise
        return None
    if fit.unmatched:
        raise PeftlabError(f"{source} does not fit {reference}: {next(iter(fit.unmatched.values()))}")
    return fit


def _scaled(adapter: Adapter, config: LoraConfig, source: str | Path) -> tuple[Factors, Factors]:
    """Return the factors of modules, and those of parameters of experts, in fp32 with the scaling in B."""
    modules: Factors = {}
    experts: Factors = {}
    for name, a in adapter.tensors.items():
        suffix = next((suffix for suffix in _A_SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            continue
        owner = name.removesuffix(suffix)
        b = adapter.tensors.get(name.removesuffix("A") + "B")
        if b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise PeftlabError(f"{source}: {owner} has no two matrices B and A that could be multiplied")
        kind = experts if suffix == "_lora_A" else modules
        rank = config.rank(owner) if kind is experts else a.shape[0]
        kind[owner] = a.float(), (b.double() * config.scale(owner, rank)).float()
    return modules, experts


def _write(directory: Path, factors: Factors, rank: int, adapter: Adapter, fit: AdapterFit | None) -> None:
    """Write factors in peft's format, padded with zeros to one rank."""
    tensors: dict[str, Tensor] = {}
    embeddings = {name.removesuffix(".lora_embedding_A") for name in adapter.tensors if "lora_embedding_A" in name}
    for module, (a, b) in sorted(factors.items()):
        missing = rank - a.shape[0]
        names = ("lora_embedding_A", "lora_embedding_B") if module in embeddings else ("lora_A.weight", "lora_B.weight")
        padded = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        for side, factor in zip(names, padded, strict=True):
            tensors[f"{PREFIX}{module}.{side}"] = factor.contiguous()
    raw: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": adapter.task_type,
        "base_model_name_or_path": adapter.base_reference,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(factors, fit),
    }
    write_tensors(directory / WEIGHTS_FILE, tensors, {})
    write_json(directory / CONFIG_FILE, raw)


def _target_modules(factors: Factors, fit: AdapterFit | None) -> list[str]:
    """Return the last names of modules where these pick the modules with factors and no others, else full names.

    Matrices of single experts have only last names, by which peft knows them.
    """
    single = {module for module in factors if fit is not None and single_expert(fit.architecture, module)}
    last = {module.rpartition(".")[2] for module in factors}
    if fit is not None:
        picked = {name for name in fit.modules if name.rpartition(".")[2] in last}
        if picked == set(factors) - single:
            return sorted(last)
    return sorted({module.rpartition(".")[2] for module in single} | (set(factors) - single))
