"""Token ids of a text that a server returned, as the target wrote them after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.drafting.hidden_states import frozen_hidden, head_weight

_ANCHOR = "\n"  # begins a line: what follows is tokenised as after other text, not as the beginning of one


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of token ids, special ones included, every space as it is."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def readings(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], text: str) -> list[list[int]]:
    """Return the token ids that decode to ``text`` after ``prompt``; none if the text does not decode back.

    There are two where the tokenizer drops a leading space (Llama 2's: ``there`` and ``▁there`` decode alike on their
    own) and the text begins with none: some servers decode the answer with the prompt, others alone. The text as it is
    comes first.
    """
    found = [ids for ids in [_after(tokenizer, prompt, text)] if ids]
    if not text.startswith(" "):
        spaced = _after(tokenizer, prompt, f" {text}")
        if spaced and text_of(tokenizer, spaced) == text:
            found.append(spaced)
    return found


def _after(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], text: str) -> list[int] | None:
    """Return the ids of a text that follows ``prompt`` without more or less space; None if there are none."""
    expected = text_of(tokenizer, prompt) + text
    alone = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    anchor = list(tokenizer(_ANCHOR, add_special_tokens=False)["input_ids"])
    anchored = list(tokenizer(_ANCHOR + text, add_special_tokens=False)["input_ids"])
    candidates = [alone]
    if anchored[: len(anchor)] == anchor:
        candidates.append(anchored[len(anchor) :])
    return next((ids for ids in candidates if text_of(tokenizer, [*prompt, *ids]) == expected), None)


@torch.no_grad()
def likeliest(target: PreTrainedModel, prompt: Sequence[int], candidates: Sequence[list[int]]) -> list[int]:
    """Return the candidate whose first token the target gives the highest probability after ``prompt``."""
    if len(candidates) == 1:
        return candidates[0]
    inputs = torch.tensor([list(prompt)], device=head_weight(target).device)
    state = frozen_hidden(target, inputs, torch.ones_like(inputs))[0, -1]
    logits = F.linear(state, head_weight(target))
    return max(candidates, key=lambda ids: float(logits[ids[0]]))
