"""The forward pass of ``transformers`` on a ``KVCache``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from peftlab.decoding.engines.base import Encoder, Output
from peftlab.decoding.engines.cache import Block, Context, KVCache, additive
from peftlab.decoding.engines.encoder_decoder import Decoder
from peftlab.errors import PeftlabError
from peftlab.models.quantised import inputs_as_they_are, int8_maps


class TransformersEngine:
    """The model's own forward, with peftlab's positions and a four-dimensional mask, or with its own mask.

    Args:
        model: a causal language model, or the decoder of an encoder-decoder model.
        vocabulary: see ``build.build_engine``.
        masks: give the model a mask of what each token sees. Without, the model masks as in its own ``generate``, which
            is right for rows of one length without trees only.
        features: see ``build.build_engine``.

    Raises:
        PeftlabError: the model keeps a state that cannot be cropped, or is not a decoder.
    """

    def __init__(
        self,
        model: PreTrainedModel | Decoder,
        vocabulary: int | None = None,
        *,
        masks: bool = True,
        features: Sequence[int] = (),
    ):
        config = model.config.get_text_config(decoder=True)
        name, head = type(model).__name__, model.get_output_embeddings()
        if head is None:
            raise PeftlabError(f"{name} is not a language model; load one for causal LM")
        kinds = {type(layer) for layer in DynamicCache(config=config).layers} or {DynamicLayer}
        if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
            raise PeftlabError(f"{name} keeps a state other than keys and values, which cannot be cropped")
        self.kind = "transformers" if masks else "transformers, its own mask"
        self.packed: tuple[str, ...] = ()
        self.model, self.config, self.head = model, config, head
        self.encoder: Encoder | None = model if isinstance(model, Decoder) else None
        self.vocab_size = vocabulary or self.head.get_parameter("weight").shape[0]
        self.limit = limit_of(config)
        self.layers = config.num_hidden_layers
        self.device = model.device
        self.positioned = masks
        self._masks, self._features = masks, tuple(features)
        self._int8 = int8_maps(model)
        self._window = getattr(config, "sliding_window", None)
        self._types = set(getattr(config, "layer_types", None) or ())

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """See ``Engine.new_cache``."""
        return KVCache(self.layers, batch, capacity, context)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        positions = block.positions(self.device).expand(len(tokens), -1)
        if self.limit is not None:
            positions = positions.clamp_max(self.limit - 1)  # of rows that are at the end, and draft nothing
        head_inputs: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
        try:
            with inputs_as_they_are(self._int8):
                logits, features = self._logits(cache, tokens, positions, block, keep)
        finally:
            hook.remove()
        hidden = head_inputs[0]
        if keep is not None and self.encoder is not None:  # such a model computes them all
            logits, hidden = logits[:, keep], hidden[:, keep]
        return Output(logits[..., : self.vocab_size], hidden, features)

    def _logits(
        self, cache: KVCache, tokens: Tensor, positions: Tensor, block: Block, keep: list[int] | None
    ) -> tuple[Tensor, Tensor | None]:
        slots, context = _Slots if self._masks else _Copies, cache.context
        if context is not None and block.rows is not None:
            context = context.select(block.rows)
        output = self.model(
            input_ids=tokens,
            attention_mask=self._mask(block) if self._masks else None,
            position_ids=positions,
            past_key_values=Cache(layers=[slots(cache, block, i, self._seen(block)) for i in range(self.layers)]),
            use_cache=True,
            logits_to_keep=torch.tensor(keep, device=self.device) if keep is not None else 0,
            output_hidden_states=bool(self._features),
            **({} if context is None else {"context": context}),
        )
        features = [output.hidden_states[layer] for layer in self._features]
        return output.logits, torch.cat(features, -1) if features else None

    def _seen(self, block: Block) -> int:
        """How many slots the model is shown. In a chain none past its limit: it may have no bias or mask for them."""
        return block.end if self.limit is None or block.tree else min(block.end, self.limit)

    def _mask(self, block: Block) -> Tensor | dict[str, Tensor | None] | None:
        # Always a tensor: without one, the library would derive a causal mask from its own idea of positions.
        everything = torch.ones(1, 1, block.n, block.end, dtype=torch.bool, device=self.device)

        def mask(window: int | None) -> Tensor | None:
            visible = block.visible(window, self.device)
            visible = everything if visible is None else visible
            visible = visible.expand(len(block.starts), -1, -1, -1)
            return additive(visible[..., : self._seen(block)], self.model.dtype)

        if len(self._types) > 1:
            return {"full_attention": mask(None), "sliding_attention": mask(self._window)}
        return mask(None if self._types == {"full_attention"} else self._window)


def limit_of(config: PretrainedConfig) -> int | None:
    """Return how many positions a model of this (text) config knows; None if it states no limit."""
    # MPT has no other name for it: its biases are made for this number of positions.
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


class _Slots(CacheLayerMixin):
    """One layer of a ``KVCache`` as ``transformers`` sees it, for one forward pass."""

    def __init__(self, cache: KVCache, block: Block, layer: int, seen: int):
        super().__init__()
        self.cache, self.block, self.layer, self.seen = cache, block, layer, seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the ``KVCache`` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.write(self.layer, torch.cat((key_states, value_states), 1), self.block)
        return keys[:, :, : self.seen], values[:, :, : self.seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.block.end, 0

    def get_seq_length(self) -> int:
        return self.block.end - self.block.n

    def get_max_length(self) -> int:
        return self.cache.capacity


class _Copies(_Slots):
    """Gives keys and values in one piece of memory, as the library's cache does: some models rely on it."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        return keys.contiguous(), values.contiguous()
