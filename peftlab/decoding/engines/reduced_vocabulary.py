"""A draft model that computes the logits of some of its vocabulary only: for a small draft, most of its time.

The draft's directory stays a plain model that any library loads; the token ids are stored beside the weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.decoding.engines.base import Output, Wrapper
from peftlab.decoding.engines.build import build_engine
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.errors import PeftlabError
from peftlab.files import member, read_object, write_json
from peftlab.outputs import record

FILE = "draft_vocabulary.json"  # not safetensors: servers load every such file of a directory as weights


def write_tokens(directory: str | Path, tokens: Tensor) -> None:
    """Store in a draft's directory the only tokens that it proposes, [V_d]."""
    record(Path(directory), FILE)
    write_json(Path(directory) / FILE, {"tokens": tokens.tolist()})


def read_tokens(directory: str | Path) -> Tensor | None:
    """Return the only tokens that the draft in a directory proposes, [V_d]; None for all."""
    file = Path(directory) / FILE
    if not file.exists():
        return None
    tokens = member(read_object(file), "tokens", list, file)
    if not tokens or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise PeftlabError(f"{file}: tokens must be a list of token ids")
    return torch.tensor(tokens)


class ReducedVocabulary(Wrapper):
    """An engine whose logits outside ``tokens`` are -inf; the others are computed from rows of the LM head.

    The acceptance of what it drafts is at most p(V_d), the target's probability of those tokens.

    Args:
        model: a draft that is not used otherwise; its LM head is replaced. tokens: [V_d], ids below ``vocabulary``.
        vocabulary: V, of the logits given. pack: see ``build_engine``.

    Raises:
        PeftlabError: a token id outside the vocabulary, or what ``build_engine`` raises.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, vocabulary: int, *, pack: bool = True):
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise PeftlabError(f"{FILE}: token ids outside 0..{vocabulary - 1}, the vocabulary")
        whole = model.get_output_embeddings()
        assert isinstance(whole, nn.Linear)
        head = nn.Linear(whole.in_features, len(tokens), bias=whole.bias is not None, device="meta")
        head.weight = nn.Parameter(whole.weight.detach()[tokens], requires_grad=False)
        if whole.bias is not None:
            head.bias = nn.Parameter(whole.bias.detach()[tokens], requires_grad=False)
        model.set_output_embeddings(head)
        super().__init__(build_engine(model, pack=pack), f", {len(tokens):,} of {vocabulary:,} tokens")
        self.vocab_size = vocabulary
        self._tokens = tokens.to(self.device)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        output = self._engine.forward(cache, tokens, block, keep)
        some = output.logits
        logits = some.new_full((*some.shape[:-1], self.vocab_size), -torch.inf)
        return Output(logits.index_copy_(-1, self._tokens, some), output.hidden)
