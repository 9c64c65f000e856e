"""A second language model as a draft: loaded, new or cut from the target, trained beside it, read back for decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.checkpoints.folded import load_model
from peftlab.decoding.engine import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.flat import structure_of
from peftlab.decoding.model_drafter import ModelDrafter, ReducedVocabulary, read_draft_tokens, write_draft_tokens
from peftlab.drafting.acceptance import measure, response_tokens
from peftlab.drafting.base import Draft, DraftJob, Loss, Opened, Opening, Saved, Served
from peftlab.drafting.checks import (
    check_dtypes,
    check_head,
    check_models,
    check_targets,
    check_tokenizers,
    check_tokens,
    common_vocabulary,
    end_ids,
)
from peftlab.drafting.config import ModelDraft
from peftlab.drafting.losses import PairLoss
from peftlab.drafting.model import OnPolicy, fresh_config, fresh_model, opened_beside, shared_layers
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.pruning import Search, choose_layers, choose_units, kept_units, pruned_draft
from peftlab.drafting.states import head_weight, layer_stack, truncate
from peftlab.errors import PeftlabError
from peftlab.models.dtypes import DTYPES
from peftlab.models.pretrained import load_config, load_tokenizer
from peftlab.models.quantised import quantised_linears
from peftlab.untyped import Attributes


@dataclass
class PairDraft(Draft):
    """A draft model beside its target; ``reference`` is AdaSPEC's, None where all tokens are trained on."""

    reference: PreTrainedModel | None = None


def check(job: DraftJob[ModelDraft], target: PretrainedConfig) -> None:
    """Refuse layers the target does not have, and a model whose tokenizer or dtype does not fit the target's."""
    config = job.config
    if config.vocabulary is not None and not job.folds:
        raise PeftlabError("draft.vocabulary: is stored beside the merged weights, and the method has no linear fold")
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
    for reference in job.data.targets or []:
        check_targets(job.tokenizer, load_tokenizer(reference), reference)
    if config.from_ is not None:
        chat = bool(getattr(job.tokenizer, "chat_template", None)) and job.data.chat is not False
        check_tokenizers(job.tokenizer, load_tokenizer(config.from_), chat=chat)
        check_dtypes(target, load_config(config.from_))


def load(job: DraftJob[ModelDraft], target: PreTrainedModel) -> PairDraft:
    """Return the draft and AdaSPEC's reference, checked against the target.

    A draft that is found in the target on its text (``prepare``) is the whole target until then.
    """
    config, base = job.config, str(job.directory / "base")
    base_model: Callable[[], PreTrainedModel] | None = None
    dtype = DTYPES[config.dtype]
    if config.new is not None:
        base_model = partial(fresh_model, target, config.new, dtype, job.seed)
        model = base_model()
    elif config.searched:
        source = _plain(job, target, dtype)
        model = truncate(source, range(len(layer_stack(source))), share=True)
    elif config.truncate is not None and config.truncate.layers is not None:
        layers, source = config.truncate.layers, _plain(job, target, dtype)
        model = truncate(source, layers)
        base_model = partial(truncate, source, layers, share=True)
    else:
        assert config.from_ is not None
        base = config.from_
        model, _ = load_model(base, "AutoModelForCausalLM", dtype=dtype, trust_remote_code=job.trust_remote_code)
    reference: PreTrainedModel | None = None
    if job.objective.reference is not None:
        reference, _ = load_model(job.objective.reference, "AutoModelForCausalLM", dtype=dtype)
    others = [_further(reference, target, job) for reference in job.data.targets or []]
    for served in others:
        check_models(served, model, job.longest)
    for other in [model] if reference is None else [model, reference]:
        check_head(other, "draft")
        check_models(target, other, job.longest)
        module: nn.Module = other  # transformers' own annotation of ``to`` has no ``self``
        module.to(job.device)
    model.requires_grad_(not config.searched)
    eos = end_ids(target, job.tokenizer)
    return PairDraft(model, model, target, base, eos, reference, base_model=base_model, others=others)


def _further(reference: str, target: PreTrainedModel, job: DraftJob[ModelDraft]) -> PreTrainedModel:
    """Load a further target of the draft, in the dtype of the first."""
    load_config(reference)
    other, _ = load_model(
        reference, "AutoModelForCausalLM", dtype=target.dtype, trust_remote_code=job.trust_remote_code
    )
    check_head(other, f"data.targets: {reference}")
    rows = [len(head_weight(model)) for model in (target, other)]
    if rows[0] != rows[1]:
        raise PeftlabError(f"data.targets: the LM head of {reference} has {rows[1]} rows, the target's has {rows[0]}")
    nn.Module.to(other, job.device).requires_grad_(False)
    return other


def prepare(job: DraftJob[ModelDraft], draft: PairDraft, train: Dataset) -> None:
    """Find the draft in the target where the recipe asks for that: the layers by gates, or what is pruned."""
    config, source = job.config, draft.adapted
    if not config.searched:
        return
    search = Search(source, draft.target, make_objective(job.objective), train, job.batch_size, job.seed)
    if config.prune is not None:
        found = search.find(job.cache, config.prune, partial(choose_units, search, config.prune))
        draft.base_model = partial(pruned_draft, source, found.tensors)
        model = draft.base_model()
    else:
        assert config.truncate is not None
        found = search.find(job.cache, config.truncate, partial(choose_layers, search, config.truncate))
        layers = found.tensors["layers"].tolist()
        draft.base_model = partial(truncate, source, layers, share=True)
        model = truncate(source, layers)
    draft.chosen = found.report
    nn.Module.to(model, job.device)
    draft.model = draft.adapted = model.requires_grad_(True)


def _plain(job: DraftJob[ModelDraft], target: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the target with plain weights in ``dtype``: itself if it has them, else loaded once more."""
    if target.dtype == dtype and not any(quantised_linears(target)):
        return target
    options: Attributes = {"revision": job.revision, "trust_remote_code": job.trust_remote_code}
    return load_model(job.target, "AutoModelForCausalLM", dtype=dtype, **options)[0]


def loss(job: DraftJob[ModelDraft], draft: PairDraft) -> Loss:
    """Return the objective between target and draft, with text of the draft's own where the recipe asks for it."""
    data = job.data
    rewrite = OnPolicy(data.on_policy, data.temperature, draft.eos) if data.on_policy else None
    return PairLoss(make_objective(job.objective), draft.target, draft.reference, rewrite, draft.others)


def score(draft: PairDraft, model: nn.Module, data: Dataset, batch_size: int) -> dict[str, float]:
    """Return how often the target that wrote the text would accept the draft's tokens."""
    teacher = data["teacher"][0] if "teacher" in data.column_names else 0
    return measure((draft.target, *draft.others)[teacher], model, data, batch_size).rates()


def save(job: DraftJob[ModelDraft], draft: PairDraft, directory: Path, train: Dataset) -> Tensor | None:
    """Write which tokens the merged draft is restricted to, where its vocabulary is reduced."""
    tokens = response_tokens(train, job.config.vocabulary, draft.target)
    if tokens is not None:
        write_draft_tokens(directory / "merged", tokens)
    return tokens


def drafter(draft: PairDraft, saved: Saved | None) -> Served:
    """Return the target with the draft as it is on disk, or in memory where it is not merged."""
    model = draft.adapted if saved is None or saved.merged is None else saved.merged
    tokens = saved.tokens if saved is not None else None
    return Served(draft.target, partial(ModelDrafter, draft_engine(model, tokens=tokens)))


def find(reference: str) -> str:
    """Return the merged model of a run, else the reference itself: any model is a draft until it is loaded."""
    merged = Path(reference) / "merged"
    return str(merged) if (merged / "config.json").exists() else reference


def open(reference: str, opening: Opening) -> Opened:
    """Load the draft and check it against the target; its tokenizer is compared before weights are read."""
    return open_model(reference, opening, beside=True)


def open_model(reference: str, opening: Opening, *, beside: bool) -> Opened:
    """Return what ``open`` returns; ``beside``: as one that shares its first layers with the target, where they are."""
    load_config(reference)  # a wrong name is found before any weights are read
    tokenizer = _tokenizer_of(reference)
    check_tokens(opening.tokenizer, tokenizer)
    target = opening.target
    model = opening.load(reference, opening.draft_dtype)
    vocabulary = common_vocabulary(target, model, tokenizer)
    size = model.num_parameters()
    alone = not beside or model.config.is_encoder_decoder or structure_of(target) is None
    first = 0 if alone else shared_layers(target, model)
    engine = draft_engine(model, vocabulary, read_draft_tokens(reference), pack=opening.pack)
    return opened_beside(Opened(size, engine=engine, vocabulary=vocabulary), first)


def export(place: str, consumer: str) -> Path:
    """Return the plain model directory."""
    if not (Path(place) / "config.json").exists():
        raise PeftlabError(
            f"--for {consumer}: {place} contains no plain model directory (no merged/ and no config.json); drafts of "
            "methods without a linear fold cannot be loaded there"
        )
    return Path(place)


def update(config: ModelDraft, newest: Path, log: Path) -> ModelDraft:
    """Return the section that continues from the merged draft of ``newest``."""
    merged = newest / "merged"
    if not (merged / "config.json").exists():
        raise PeftlabError(f"{newest}: contains no merged draft to continue from; did the run end, and with a fold?")
    return config.model_copy(update={"from_": str(merged), "truncate": None, "prune": None, "new": None})


def draft_engine(
    draft: PreTrainedModel, vocabulary: int | None = None, tokens: Tensor | None = None, *, pack: bool = True
) -> Engine:
    """Return a draft's engine, restricted to ``tokens`` [V_d] if they are given (``engines.reduced_vocabulary``)."""
    if tokens is None:
        return build_engine(draft, vocabulary=vocabulary, pack=pack)
    head = draft.get_output_embeddings()
    assert head is not None
    return ReducedVocabulary(draft, tokens, vocabulary or head.weight.shape[0], pack=pack)


def _tokenizer_of(reference: str) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(reference)
    except PeftlabError:
        return None  # a draft may be saved without one; then only the sizes can be compared
