"""A second, smaller language model as a draft."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engine import Engine
from peftlab.decoding.engines import build_engine
from peftlab.decoding.flat import FlatEngine
from peftlab.decoding.own_layers import AdaptedExit, EarlyExit, KangarooDrafter
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.base import Opened, OwnLayers
from peftlab.drafting.config import NewModel
from peftlab.drafting.states import layer_stack, unwrapped
from peftlab.errors import PeftlabError, reason
from peftlab.methods.modes import eval_mode


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
    """Return how many first layers a draft has in common with its target, number for number; at most all but its last.

    0 where the two embed tokens differently, have another dtype, or differ in their configurations otherwise.
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


def opened_beside(opened: Opened, first: int) -> Opened:
    """Return a draft model, opened as a model of its own, as one that shares its first layers with a flat target."""
    draft = opened.engine
    if not first or not isinstance(draft, FlatEngine):
        return opened
    return replace(opened, own=partial(_adapted, draft, first), features=(first,))


def _adapted(draft: FlatEngine, first: int, target: Engine) -> OwnLayers | None:
    if not isinstance(target, FlatEngine):
        return None
    adapted = AdaptedExit(EarlyExit(target, first), draft)
    return OwnLayers(adapted, partial(KangarooDrafter, adapted=adapted))


def _same_tensors(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
