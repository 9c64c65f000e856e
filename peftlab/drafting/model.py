"""A second, smaller language model as a draft."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.adapter import load_model
from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.flat import FlatEngine, structure_of
from peftlab.decoding.model_drafter import ModelDrafter, ReducedVocabulary, read_draft_tokens, write_draft_tokens
from peftlab.decoding.own_layers import AdaptedExit, EarlyExit, KangarooDrafter
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.acceptance import measure, response_tokens
from peftlab.drafting.base import DraftExporter, DraftKind, Loss, OwnLayers, Pair, SavedDraft, ServedDraft, TargetLoader
from peftlab.drafting.config import ModelDraft, NewModel
from peftlab.drafting.objectives import PairLoss, make_objective
from peftlab.drafting.pruning import Search, choose_layers, choose_units, kept_units, pruned_draft
from peftlab.drafting.target import (
    check_dtypes,
    check_head,
    check_models,
    check_targets,
    check_tokenizers,
    check_tokens,
    common_vocabulary,
    head_weight,
    layer_stack,
    truncate,
    unwrapped,
)
from peftlab.errors import PeftlabError, reason
from peftlab.models.load import eval_mode, load_config, load_tokenizer
from peftlab.models.quantised import DTYPES, quantised_linears
from peftlab.untyped import Attributes

ModelConfigT = TypeVar("ModelConfigT", bound=ModelDraft)


@dataclass
class OnPolicy:
    """Exchanges each row's continuation, with probability ``share`` (λ), for one the draft writes now.

    Agarwal et al. 2023 (arXiv 2306.13649), Zhou et al. 2023 (arXiv 2310.08461). A rewritten row has the weight
    of the row it replaces, spread over its own tokens, and is at most as long. Randomness comes from torch's
    global generator, whose state checkpoints contain.

    Attributes:
        share: λ. temperature: of the draft's sampling; 0 is greedy. eos: ids that end a continuation.
    """

    share: float
    temperature: float
    eos: frozenset[int]
    _engine: Engine | None = field(init=False, repr=False, default=None)

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch with some rows rewritten; keys and shapes stay."""
        chosen = (torch.rand(len(inputs["input_ids"])) < self.share).nonzero().squeeze(-1).tolist()
        seed = int(torch.randint(2**31, ()))
        if not chosen:
            return inputs
        bare = unwrapped(model)
        counts = (inputs["weights"] > 0).sum(1).tolist()
        starts = (inputs["weights"] > 0).int().argmax(1).tolist()
        prompts = [inputs["input_ids"][i, : starts[i] + 1].tolist() for i in chosen]
        with eval_mode(bare):
            if self._engine is None:
                self._engine = build_engine(bare, flat=False)  # reads the weights anew at every step
            outputs = decode(
                self._engine,
                prompts,
                StoppingCriteria(max(counts[i] for i in chosen), self.eos),
                sampling=Sampling(self.temperature, seed=seed),
            )
        inputs = {key: value.clone() for key, value in inputs.items()}
        for i, output in zip(chosen, outputs, strict=True):
            tokens = output.tokens[: counts[i]]
            begin, end = starts[i] + 1, starts[i] + 1 + len(tokens)
            inputs["input_ids"][i, begin:end] = torch.tensor(tokens, device=inputs["input_ids"].device)
            inputs["attention_mask"][i, end:] = 0
            inputs["weights"][i] = 0
            inputs["weights"][i, begin - 1 : end - 1] = counts[i] / len(tokens)
        return inputs


FAMILIES = (
    "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
    "smollm3",
)  # fmt: skip
"""The model types whose sizes are those that ``fresh_config`` sets."""

_HEAD = 8  # a head size other than the target's is a multiple of it


def fresh_config(target: PretrainedConfig, size: NewModel) -> PretrainedConfig:
    """Return a configuration like the target's with other sizes.

    The heads are as large as the target's if these divide the width, else the largest multiple of 8 below them that
    does. As many query heads share a key-value head as in the target, or the next smaller number that divides the
    heads. The feed-forward width is in proportion, rounded to a multiple of 8. A list with an entry per layer is
    sampled evenly, its last entry included. Vocabulary, tied embeddings and positions are the target's.

    Args:
        target: its configuration. size: layers and width.

    Raises:
        PeftlabError: the target is of another family, or no head size divides the width.
    """
    if target.model_type not in FAMILIES:
        raise PeftlabError(
            f"draft.new: the target is a {target.model_type} model; sizes are derived for {', '.join(FAMILIES)}. "
            "Write draft: {kind: model, from: REF} with a small model over its tokens"
        )
    config = copy.deepcopy(target)
    layers, width = target.num_hidden_layers, target.hidden_size
    dim = getattr(target, "head_dim", None) or width // target.num_attention_heads
    head = next((n for n in (dim, *range(dim // _HEAD * _HEAD, 0, -_HEAD)) if size.width % n == 0), None)
    if head is None:
        near = max(1, round(size.width / dim)) * dim
        raise PeftlabError(f"draft.new.width: {size.width} is no multiple of a head's size; the nearest is {near}")
    heads = size.width // head
    config.num_hidden_layers, config.hidden_size, config.num_attention_heads = size.layers, size.width, heads
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if getattr(target, "head_dim", None):
        config.head_dim = head
    if getattr(target, "num_key_value_heads", None):
        shared = target.num_attention_heads // target.num_key_value_heads
        config.num_key_value_heads = heads // next(n for n in range(shared, 0, -1) if heads % n == 0)
    inner = "n_inner" if target.model_type == "gpt2" else "intermediate_size"
    if getattr(target, inner) is not None:  # GPT-2's default is four times the width
        setattr(config, inner, max(1, round(getattr(target, inner) * size.width / width / 8)) * 8)
    for name, value in list(vars(target).items()):
        if "layer" in name and isinstance(value, list) and len(value) == layers:
            setattr(config, name, [value[(i + 1) * layers // size.layers - 1] for i in range(size.layers)])
    return config


def fresh_model(target: PreTrainedModel, size: NewModel, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Return a model of the target's class with random weights, the same for the same seed; in eval mode.

    Args:
        target: the model. size: layers and width. dtype: of the weights. seed: of the weights.

    Raises:
        PeftlabError: the class makes no model of these sizes; the library's reason is given.
    """
    config = fresh_config(target.config, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = type(target)._from_config(config, dtype=dtype)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise PeftlabError(f"draft.new: no {type(target).__name__} of these sizes: {reason(error)}") from None
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()


# What may differ between two configurations of which one has fewer layers.
_APART = {"num_hidden_layers", "n_layer", "layer_types", "max_window_layers", "dtype", "architectures", "use_cache"}

_APART |= {"transformers_version", "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"}


def shared_layers(target: PreTrainedModel, draft: PreTrainedModel) -> int:
    """Return how many first layers of a draft equal its target's, number for number, not counting its last.

    0 where the two embed tokens differently, have another dtype, or differ in their configurations otherwise.

    Args:
        target, draft: causal language models.
    """
    ours, theirs = target.config.to_dict(), draft.config.to_dict()
    differing = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    if type(target) is not type(draft) or target.dtype != draft.dtype or differing - _APART:
        return 0
    if not _same_tensors(target.get_input_embeddings(), draft.get_input_embeddings()):
        return 0
    kinds = ours.get("layer_types") or [], theirs.get("layer_types") or []
    pairs = [*zip(layer_stack(target), layer_stack(draft), strict=False)][: len(layer_stack(draft)) - 1]
    apart = (
        i for i, pair in enumerate(pairs) if kinds[0][i : i + 1] != kinds[1][i : i + 1] or not _same_tensors(*pair)
    )
    return next(apart, len(pairs))


def _adapted(draft: FlatEngine, first: int, target: Engine) -> OwnLayers | None:
    """Return the target's first layers with the draft's others on them; None where the kernel is no flattened step."""
    if not isinstance(target, FlatEngine):
        return None
    adapted = AdaptedExit(EarlyExit(target, first), draft)
    return OwnLayers(adapted, partial(KangarooDrafter, adapted=adapted))


def _same_tensors(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether two modules have equal tensors by the same names."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


class ModelKind(DraftKind[ModelConfigT]):
    """A draft model beside its target, loaded, new or cut from the target.

    Attributes:
        reference: AdaSPEC's; None where all tokens are trained on.
    """

    name = "model"
    reference: PreTrainedModel | None = None

    def check(self, target: PretrainedConfig) -> None:
        """Refuse layers the target does not have, and a model whose tokenizer or dtype does not fit the target's."""
        config, data = self.config, self.recipe.data
        if config.vocabulary is not None and not self.folds:
            raise PeftlabError(
                "draft.vocabulary: is stored beside the merged weights, and the method has no linear fold"
            )
        if config.new is not None:
            fresh_config(target, config.new)
        elif config.prune is not None:
            kept_units(target, config.prune.shares())
        elif config.truncate is not None:
            count = target.get_text_config(decoder=True).num_hidden_layers
            missing = [layer for layer in config.truncate.layers or [] if not 0 <= layer < count]
            if missing:
                raise PeftlabError(f"draft.truncate.layers: no layer {missing[0]}; the target has 0 to {count - 1}")
            if (config.truncate.keep or 0) >= count:
                raise PeftlabError(f"draft.truncate.keep: {config.truncate.keep}, and the target has {count} layers")
        for reference in data.targets or []:
            check_targets(self.tokenizer, load_tokenizer(reference), reference)
        if config.from_ is not None:
            chat = bool(getattr(self.tokenizer, "chat_template", None)) and data.chat is not False
            check_tokenizers(self.tokenizer, load_tokenizer(config.from_), chat=chat)
            check_dtypes(target, load_config(config.from_))

    def load(self, target: PreTrainedModel) -> None:
        """Load or make the draft and AdaSPEC's reference, checked against the target.

        A draft that is found in the target on its text (``prepare``) is the whole target until then.
        """
        config, recipe, dtype = self.config, self.recipe, DTYPES[self.config.dtype]
        self.target, self.base = target, str(self.directory / "base")
        if config.new is not None:
            self.base_model = partial(fresh_model, target, config.new, dtype, recipe.train.seed)
            model = self.base_model()
        elif config.searched:
            source = self._plain_target(dtype)
            model = truncate(source, range(len(layer_stack(source))), share=True)
        elif config.truncate is not None and config.truncate.layers is not None:
            layers, source = config.truncate.layers, self._plain_target(dtype)
            model = truncate(source, layers)
            self.base_model = partial(truncate, source, layers, share=True)
        else:
            assert config.from_ is not None
            self.base = config.from_
            model = self._load(self.base, dtype)
        self.others = [self._further_target(reference) for reference in recipe.data.targets or []]
        for served in self.others:
            check_models(served, model, self.longest)
        if recipe.objective.reference is not None:
            self.reference, _ = load_model(recipe.objective.reference, "AutoModelForCausalLM", dtype=dtype)
        for other in [model] if self.reference is None else [model, self.reference]:
            check_head(other, "draft")
            check_models(target, other, self.longest)
            nn.Module.to(other, self.device)
        self.model = self.adapted = model.requires_grad_(not config.searched)

    def _load(self, reference: str, dtype: torch.dtype) -> PreTrainedModel:
        trust = self.recipe.trust_remote_code
        return load_model(reference, "AutoModelForCausalLM", dtype=dtype, trust_remote_code=trust)[0]

    def _plain_target(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return the target with plain weights in ``dtype``: itself if it has them, else loaded once more."""
        if self.target.dtype == dtype and not any(quantised_linears(self.target)):
            return self.target
        options: Attributes = {"revision": self.recipe.revision, "trust_remote_code": self.recipe.trust_remote_code}
        return load_model(self.recipe.target, "AutoModelForCausalLM", dtype=dtype, **options)[0]

    def _further_target(self, reference: str) -> PreTrainedModel:
        """Load a further target of the draft, in the dtype of the first."""
        load_config(reference)
        other = self._load(reference, self.target.dtype)
        check_head(other, f"data.targets: {reference}")
        rows = [len(head_weight(model)) for model in (self.target, other)]
        if rows[0] != rows[1]:
            raise PeftlabError(
                f"data.targets: the LM head of {reference} has {rows[1]} rows, the target's has {rows[0]}"
            )
        nn.Module.to(other, self.device).requires_grad_(False)
        return other

    def prepare(self, train: Dataset) -> None:
        """Search the target for the draft where the recipe asks for it: layers by gates, or units by pruning."""
        config, source, settings = self.config, self.adapted, self.recipe.train
        if not config.searched:
            return
        objective = make_objective(self.recipe.objective)
        search = Search(source, self.target, objective, train, settings.batch_size, settings.seed)
        if config.prune is not None:
            found = search.find(self.cache, config.prune, partial(choose_units, search, config.prune))
            self.base_model = partial(pruned_draft, source, found.tensors)
            model = self.base_model()
        else:
            assert config.truncate is not None
            found = search.find(self.cache, config.truncate, partial(choose_layers, search, config.truncate))
            layers = found.tensors["layers"].tolist()
            self.base_model = partial(truncate, source, layers, share=True)
            model = truncate(source, layers)
        self.chosen = found.report
        nn.Module.to(model, self.device)
        self.model = self.adapted = model.requires_grad_(True)

    def rewriting(self) -> OnPolicy | None:
        """Return what mixes text of the draft's own into training, where the recipe asks for it."""
        data = self.recipe.data
        return OnPolicy(data.on_policy, data.temperature, self.eos) if data.on_policy else None

    def loss(self) -> Loss:
        """Return the objective between target and draft, with text of the draft's own where the recipe asks for it."""
        objective = make_objective(self.recipe.objective)
        return PairLoss(objective, self.target, self.reference, self.rewriting(), self.others)

    def score(self, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
        """Return how often the target that wrote the text would accept the draft's tokens."""
        teacher = data["teacher"][0] if "teacher" in data.column_names else 0
        return measure((self.target, *self.others)[teacher], model, data, batch_size).rates()

    def save(self, train: Dataset) -> Tensor | None:
        """Write which tokens the merged draft is restricted to, where its vocabulary is reduced."""
        tokens = response_tokens(train, self.config.vocabulary, self.target)
        if tokens is not None:
            write_draft_tokens(self.directory / "merged", tokens)
        return tokens

    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return the target with the draft as it is on disk, or in memory where it is not merged."""
        model = self.adapted if saved is None or saved.merged is None else saved.merged
        tokens = saved.tokens if saved is not None else None
        return ServedDraft(self.target, partial(ModelDrafter, draft_engine(model, tokens=tokens)))

    @classmethod
    def open(cls, place: str, loader: TargetLoader) -> Pair:
        """Load the draft and check it against the target; its tokenizer is compared before weights are read."""
        model, engine, vocabulary = open_model(place, loader)
        alone = model.config.is_encoder_decoder or structure_of(loader.target) is None
        first = 0 if alone else shared_layers(loader.target, model)
        size = model.num_parameters()
        if not first or not isinstance(engine, FlatEngine):
            return loader.pair(size, whole=engine, vocabulary=vocabulary)
        own = partial(_adapted, engine, first)
        return loader.pair(size, whole=engine, own=own, vocabulary=vocabulary, features=(first,))

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Return the plain model directory, which every consumer loads."""
        if not (Path(place) / "config.json").exists():
            raise PeftlabError(
                f"--for {consumer}: {place} contains no plain model directory (no merged/ and no config.json); drafts "
                "of methods without a linear fold cannot be loaded there"
            )
        return Path(place)

    @classmethod
    def update(cls, config: ModelConfigT, newest: Path, log: Path) -> ModelConfigT:
        """Return the section that continues from the merged draft of ``newest``."""
        merged = newest / "merged"
        if not (merged / "config.json").exists():
            raise PeftlabError(
                f"{newest}: contains no merged draft to continue from; did the run end, and with a fold?"
            )
        return config.model_copy(update={"from_": str(merged), "truncate": None, "prune": None, "new": None})


def open_model(reference: str, loader: TargetLoader) -> tuple[PreTrainedModel, Engine, int]:
    """Return a stored draft model, its engine, and how many logits it shares with the target.

    Args:
        reference: of the draft. loader: of the target.
    """
    load_config(reference)  # a wrong name is found before any weights are read
    tokenizer: PreTrainedTokenizerBase | None = None
    with suppress(PeftlabError):  # a draft may be saved without one; then only the sizes can be compared
        tokenizer = load_tokenizer(reference)
    check_tokens(loader.tokenizer, tokenizer)
    target = loader.target
    model = loader.load(reference, loader.draft_dtype)
    vocabulary = common_vocabulary(target, model, tokenizer)
    return model, draft_engine(model, vocabulary, read_draft_tokens(reference), pack=loader.pack), vocabulary


def draft_engine(
    draft: PreTrainedModel, vocabulary: int | None = None, tokens: Tensor | None = None, *, pack: bool = True
) -> Engine:
    """Return a draft's engine, restricted to ``tokens`` [V_d] if they are given.

    Args:
        draft: the model. vocabulary: logits that it shares with the target; None: all.
        tokens: ids that it is restricted to, [V_d]; None: all. pack: see ``decoding.engines.build_engine``.
    """
    if tokens is None:
        return build_engine(draft, vocabulary=vocabulary, pack=pack)
    head = draft.get_output_embeddings()
    assert head is not None
    return ReducedVocabulary(draft, tokens, vocabulary or head.weight.shape[0], pack=pack)
