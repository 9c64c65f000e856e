"""The forward pass of ``transformers`` on a ``KVCache``, of decoders and of encoder-decoder models (T5, BART).

The encoder reads a prompt once. What the decoder needs of it, the keys and values of its cross-attention among it, is
part of the batch's cache (``Context``), and a step of the decoder is then a step like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

from peftlab.decoding.cache import Block, Context, Encoder, KVCache, Output, additive_mask, max_positions, right_padded
from peftlab.errors import PeftlabError
from peftlab.models.quantised import inputs_as_they_are, int8_maps
from peftlab.untyped import Unwrapped


class TransformersEngine:
    """The model's own forward, with peftlab's positions and a four-dimensional mask, or with its own mask.

    Args:
        model: a causal language model, or the decoder of an encoder-decoder model.
        vocabulary: see ``engines.build_engine``.
        masks: give the model a mask of what each token sees. Without, the model masks as in its own ``generate``, which
            is right for rows of one length without trees only.
        features: see ``engines.build_engine``.

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
        self.limit = max_positions(config)
        self.layers = config.num_hidden_layers
        self.device = model.device
        self.positioned = masks
        self._masks, self._features = masks, tuple(features)
        self._int8 = int8_maps(model)
        self._window = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """Return an empty cache; see ``Engine.new_cache``."""
        return KVCache(self.layers, batch, capacity, context)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
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
        slots, context = _CacheLayer if self._masks else _ContiguousCacheLayer, cache.context
        if context is not None and block.rows is not None:
            context = context.select(block.rows)
        output = self.model(
            input_ids=tokens,
            attention_mask=self._mask(block) if self._masks else None,
            position_ids=positions,
            past_key_values=Cache(
                layers=[slots(cache, block, i, self._slots_shown(block)) for i in range(self.layers)]
            ),
            use_cache=True,
            logits_to_keep=torch.tensor(keep, device=self.device) if keep is not None else 0,
            output_hidden_states=bool(self._features),
            **({} if context is None else {"context": context}),
        )
        features = [output.hidden_states[layer] for layer in self._features]
        return output.logits, torch.cat(features, -1) if features else None

    def _slots_shown(self, block: Block) -> int:
        """Return the number of slots shown to the model: in a chain none past its limit, where it may have no mask."""
        return block.end if self.limit is None or block.tree else min(block.end, self.limit)

    def _mask(self, block: Block) -> Tensor | dict[str, Tensor | None] | None:
        # Always a tensor: without one, the library would derive a causal mask from its own idea of positions.
        everything = torch.ones(1, 1, block.n, block.end, dtype=torch.bool, device=self.device)

        def mask(window: int | None) -> Tensor | None:
            visible = block.visible(window, self.device)
            visible = everything if visible is None else visible
            visible = visible.expand(len(block.starts), -1, -1, -1)
            return additive_mask(visible[..., : self._slots_shown(block)], self.model.dtype)

        if len(self._layer_types) > 1:
            return {"full_attention": mask(None), "sliding_attention": mask(self._window)}
        return mask(None if self._layer_types == {"full_attention"} else self._window)


class _CacheLayer(CacheLayerMixin):
    """A layer of a ``KVCache`` behind the cache interface of ``transformers``, for one forward pass."""

    def __init__(self, cache: KVCache, block: Block, layer: int, seen: int):
        super().__init__()
        self.cache, self.block, self.layer, self.seen = cache, block, layer, seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the ``KVCache`` allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.write(self.layer, torch.cat((key_states, value_states), 1), self.block)
        return keys[:, :, : self.seen], values[:, :, : self.seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.block.end, 0

    def get_seq_length(self) -> int:
        return self.block.end - self.block.n

    def get_max_length(self) -> int:
        return self.cache.capacity


class _ContiguousCacheLayer(_CacheLayer):
    """A layer that returns contiguous keys and values, as the library's cache does: some models rely on it."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        return keys.contiguous(), values.contiguous()


class Decoder(nn.Module):
    """The decoder of an encoder-decoder model, with the interface of a causal language model and ``cache.Encoder``.

    Args:
        model: an encoder-decoder language model.

    Attributes:
        config: the decoder's. start: tokens that its outputs begin with: the start token, and the one that the
            generation configuration forces after it.

    Raises:
        PeftlabError: the model names no start token.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model: Unwrapped = model
        self.config = self.model.get_decoder().config
        first, forced = (_configured_token(model, name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
        if first is None:
            raise PeftlabError(f"{type(model).__name__}: its configuration names no decoder_start_token_id")
        self.start = [first] if forced is None else [first, forced]
        self.limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self._default_context: Context | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its weights."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def get_input_embeddings(self) -> nn.Module:
        """Return the decoder's embeddings."""
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the LM head."""
        head: nn.Module | None = self.model.get_output_embeddings()
        return head

    @torch.inference_mode()
    def encode(self, prompts: Sequence[Sequence[int]]) -> Context:
        """Return the encoder's output for prompts of any lengths, and the cross-attention's keys and values."""
        longest = max(map(len, prompts))
        mask = right_padded([[1] * len(prompt) for prompt in prompts], longest).to(self.device)
        ids = right_padded(prompts, longest).to(self.device)
        states = self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        first = torch.full((len(prompts), 1), self.start[0], device=self.device)
        crossed = DynamicCache()
        self._run(first, Context(states, mask, []), EncoderDecoderCache(DynamicCache(config=self.config), crossed))
        library: list[Unwrapped] = [*crossed.layers]
        return Context(states, mask, [(layer.keys, layer.values) for layer in library])

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache,
        *,
        use_cache: bool = True,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: object = 0,
        output_hidden_states: bool = False,
        context: Context | None = None,
    ) -> SimpleNamespace:
        """Run the decoder with the arguments of a causal language model.

        Positions follow from the cache's length: these models take no others. All logits are returned.

        Args:
            input_ids: [b, n]. past_key_values: cache of the self-attention. use_cache, position_ids: ignored.
            attention_mask: of the self-attention, [b, 1, n, end]. logits_to_keep: ignored.
            output_hidden_states: return the states entering each layer as well.
            context: of each row; None: that of a few tokens, the same in every row.
        """
        if context is None:
            if self._default_context is None:
                self._default_context = self.encode([list(range(min(8, self.model.config.vocab_size)))])
            context = self._default_context.select([0] * len(input_ids))
        output = self._run(
            input_ids,
            context,
            EncoderDecoderCache(past_key_values, _cross_attention_cache(context)),
            decoder_attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
        )
        return SimpleNamespace(logits=output.logits, hidden_states=output.decoder_hidden_states)

    def _run(self, tokens: Tensor, context: Context, cache: Cache, **options: object) -> SimpleNamespace:
        output: SimpleNamespace = self.model(
            decoder_input_ids=tokens, encoder_outputs=BaseModelOutput(last_hidden_state=context.states),
            attention_mask=context.mask, past_key_values=cache, use_cache=True, **options,
        )  # fmt: skip
        return output


def _cross_attention_cache(context: Context) -> DynamicCache:
    """Return the keys and values of the cross-attention as the library's cache, without a copy."""
    cache = DynamicCache()
    for keys, values in context.layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _configured_token(model: PreTrainedModel, name: str) -> int | None:
    for config in (model.generation_config, model.config):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    return None
