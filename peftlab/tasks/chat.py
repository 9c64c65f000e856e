"""Conversations formatted by the tokenizer's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message: TypeAlias = dict[str, str]
"""One turn of a conversation, ``role`` and ``content``, in transformers' own type; a template may take more than text
(a list of parts), which is passed on as it is."""


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str) -> list[int]:
    """Return the token ids of a conversation, ending with the prompt for the model's answer.

    Args:
        tokenizer: one with a chat template.
        messages: ``[{role, content}, ...]``.
        where: names the row in error messages.

    Raises:
        PeftlabError: the template rejects the conversation, or produces no text.
    """
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        text.encode()  # an unpaired surrogate: the tokenizer's own error does not name the cause
    except Exception as error:  # a template is a program that comes with the tokenizer: it may raise anything
        reason = str(error).strip() or type(error).__name__
        raise PeftlabError(
            f"{where}: the tokenizer's chat template does not take this conversation: {reason.splitlines()[0]}"
        ) from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes the special tokens
    if not ids:
        raise PeftlabError(f"{where}: the tokenizer's chat template makes an empty text of this conversation")
    return ids
