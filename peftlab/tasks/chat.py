"""Conversations as the text a model was trained to read, by its tokenizer's own template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Any, where: str) -> list[int]:
    """Return the token ids of a conversation that the model is to answer.

    Args:
        tokenizer: one with a chat template.
        messages: ``[{role, content}, ...]``.
        where: names the row in error messages.

    Raises:
        PeftlabError: the template refuses the conversation, or makes nothing of it.
    """
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        text.encode()  # the tokenizer's own complaint about half a surrogate pair does not say so
    except Exception as error:  # a template is a program that came with the tokenizer: it may raise anything
        reason = str(error).strip() or type(error).__name__
        raise PeftlabError(
            f"{where}: the tokenizer's chat template does not take this conversation: {reason.splitlines()[0]}"
        ) from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes the special tokens
    if not ids:
        raise PeftlabError(f"{where}: the tokenizer's chat template makes an empty text of this conversation")
    return ids
