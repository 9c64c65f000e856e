"""The decoder of an encoder-decoder model (T5, BART), called like a causal language model.

The encoder reads a prompt once. What the decoder needs of it, the keys and values of its cross-attention among it, is
part of the batch's cache (``Context``), and a step of the decoder is then a step like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from peftlab.decoding.engines.cache import Context
from peftlab.decoding.engines.prefill import right_padded
from peftlab.errors import PeftlabError
from peftlab.untyped import Unwrapped


class Decoder(nn.Module):
    """See ``base.Encoder``; an engine is built around it as around a causal language model.

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
        first, forced = (_token(model, name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
        if first is None:
            raise PeftlabError(f"{type(model).__name__}: its configuration names no decoder_start_token_id")
        self.start = [first] if forced is None else [first, forced]
        self.limit: int | None = getattr(model.config, "max_position_embeddings", None)
        self._usual: Context | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
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
        """Read prompts of any lengths with the encoder."""
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
        """Run the decoder as a causal language model is run.

        Positions follow from the cache's length: these models take no others. All logits are returned.

        Args:
            context: of each row; None: that of a few tokens, the same in every row.
        """
        if context is None:
            if self._usual is None:
                self._usual = self.encode([list(range(min(8, self.model.config.vocab_size)))])
            context = self._usual.select([0] * len(input_ids))
        output = self._run(
            input_ids,
            context,
            EncoderDecoderCache(past_key_values, _stored(context)),
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


def _stored(context: Context) -> DynamicCache:
    """The keys and values of the cross-attention as the library's cache, without a copy."""
    cache = DynamicCache()
    for keys, values in context.layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _token(model: PreTrainedModel, name: str) -> int | None:
    for config in (model.generation_config, model.config):
        token = getattr(config, name, None)
        if token is not None:
            return int(token)
    return None
