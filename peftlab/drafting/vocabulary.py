"""A smaller vocabulary for drafts and heads: the tokens the target's text uses most, and what leaving others costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.decoding.theory import vocabulary_cap
from peftlab.drafting.acceptance import target_states
from peftlab.drafting.hidden_states import head_weight
from peftlab.errors import PeftlabError


def frequent_tokens(texts: Iterable[Sequence[int]], size: int, vocab_size: int) -> Tensor:
    """Return the ``size`` most frequent token ids of ``texts``, rising; of equals the lower ids.

    Ids that never occur fill up what is left, the lowest first.

    Raises:
        PeftlabError: ``size`` outside 1..``vocab_size``.
    """
    if not 1 <= size <= vocab_size:
        raise PeftlabError(f"vocabulary: {size} is outside 1..{vocab_size}, the target's vocabulary")
    counts = Counter(token for text in texts for token in text)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def response_tokens(data: Dataset, size: int | None, target: nn.Module) -> Tensor | None:
    """Return the ``size`` most frequent tokens of the continuations in ``data``; None for ``size`` None."""
    if size is None:
        return None
    return frequent_tokens((row["input_ids"][row["prompt"] :] for row in data), size, len(head_weight(target)))


@torch.no_grad()
def ceiling(target: nn.Module, data: Dataset, tokens: Tensor) -> float:
    """Return the mean p(V_d) over the predictions of ``data``: no draft restricted to ``tokens`` is accepted more.

    See ``theory.vocabulary_cap``.
    """
    mass, count = 0.0, 0
    for hidden in target_states(target, data):
        p = F.linear(hidden, head_weight(target)).float().softmax(-1)
        mass += float(vocabulary_cap(p, tokens.to(p.device)).cpu().double().sum())
        count += len(p)
    return mass / max(1, count)


def reduce_heads(tensors: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Return heads' tensors with only the rows of ``tokens`` in what gives logits, and the map as ``token_map``."""
    rows = ("lm_heads.", "markov_head.markov_w2.")
    some = {name: t[tokens].clone() if name.startswith(rows) else t for name, t in tensors.items()}
    return some | {"token_map": tokens}
