"""One seam for the forward pass: tokens and a cache in, logits and hidden states out.

``build_engine`` picks the fastest step that the model and the device allow: a flattened step for Llama-like
models (``flat.py``), else the forward of ``transformers``. Both read and write the same ``KVCache``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from peftlab.decoding.cache import Block, KVCache, additive
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class Output:
    """What a forward pass gives for the tokens asked for.

    Attributes:
        logits: [b, kept, V].
        hidden: [b, kept, H], the input of the LM head (after the final norm).
    """

    logits: Tensor
    hidden: Tensor


class Engine(Protocol):
    """A model that decodes.

    Attributes:
        kind: how the step is done, for reports.
        vocab_size: V, the rows of the LM head.
        limit: positions the model knows; None where any number will do.
        layers: how many the cache holds.
        device: where tokens go.
    """

    kind: str
    vocab_size: int
    limit: int | None
    layers: int
    device: torch.device

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run tokens [b, n] that stand at ``block``; ``keep`` names the places of n to give, default all."""
        ...


def build_engine(
    model: PreTrainedModel, *, vocabulary: int | None = None, pack: bool = True, flat: bool = True
) -> Engine:
    """Return the fastest engine for ``model``.

    Args:
        model: a causal language model in eval mode; its weights must not change afterwards.
        vocabulary: give logits for the first so many tokens only, where the LM head is padded past the
            tokenizer's size: target and draft must agree.
        pack: on the CPU, lay every weight out once for FBGEMM's or oneDNN's kernels (a second copy in memory; see
            ``flat.py``). Sums are then rounded in another order than in ``transformers``.
        flat: use the flattened step where the architecture is known.

    Raises:
        PeftlabError: the model keeps a state that cannot be cropped, or is not a decoder.
    """
    from peftlab.decoding.flat import FlatEngine, flattens

    if flat and flattens(model):
        return FlatEngine(model, vocabulary, pack=pack)
    return TransformersEngine(model, vocabulary)


class TransformersEngine:
    """The model's own forward, with positions and a four-dimensional mask given by us."""

    kind = "transformers"

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None):
        config = model.config.get_text_config(decoder=True)
        name = type(model).__name__
        if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
            raise PeftlabError(f"{name} is not a decoder-only language model; load one for causal LM")
        kinds = {type(layer) for layer in DynamicCache(config=config).layers} or {DynamicLayer}
        if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            raise PeftlabError(f"{name} keeps a state other than keys and values, which cannot be cropped")
        self.model, self.config = model, config
        self.vocab_size = vocabulary or model.get_output_embeddings().weight.shape[0]
        self.limit = getattr(config, "max_position_embeddings", None)
        self.layers = config.num_hidden_layers
        self.device = model.device
        self._window = getattr(config, "sliding_window", None)
        self._types = set(getattr(config, "layer_types", None) or ())

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        positions = block.positions(self.device).expand(len(tokens), -1)
        if self.limit is not None:
            positions = positions.clamp_max(self.limit - 1)  # of rows that are at the end, and draft nothing
        head_inputs: list[Tensor] = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: head_inputs.append(inputs[0])
        )
        try:
            logits = self._logits(cache, tokens, positions, block, keep)
        finally:
            hook.remove()
        return Output(logits[..., : self.vocab_size], head_inputs[0])

    def _logits(
        self, cache: KVCache, tokens: Tensor, positions: Tensor, block: Block, keep: list[int] | None
    ) -> Tensor:
        return self.model(
            input_ids=tokens,
            attention_mask=self._mask(block),
            position_ids=positions,
            past_key_values=Cache(layers=[_Slots(cache, block, i) for i in range(self.layers)]),
            use_cache=True,
            logits_to_keep=torch.tensor(keep, device=self.device) if keep is not None else 0,
        ).logits

    def _mask(self, block: Block) -> Any:
        # Always a tensor: without one, the library would derive a causal mask from its own idea of positions.
        everything = torch.ones(1, 1, block.n, block.end, dtype=torch.bool, device=self.device)

        def mask(window: int | None) -> Tensor | None:
            visible = block.visible(window, self.device)
            visible = everything if visible is None else visible
            return additive(visible.expand(len(block.starts), -1, -1, -1), self.model.dtype)

        if len(self._types) > 1:
            return {"full_attention": mask(None), "sliding_attention": mask(self._window)}
        return mask(None if self._types == {"full_attention"} else self._window)


class _Slots(CacheLayerMixin):
    """One layer of a ``KVCache`` as ``transformers`` sees it, for one forward pass."""

    def __init__(self, cache: KVCache, block: Block, layer: int):
        super().__init__()
        self.cache, self.block, self.layer = cache, block, layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the ``KVCache`` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(self.layer, torch.cat((key_states, value_states), 1), self.block)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.block.end, 0

    def get_seq_length(self) -> int:
        return self.block.end - self.block.n

    def get_max_length(self) -> int:
        return self.cache.capacity
