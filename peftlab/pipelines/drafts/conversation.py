"""A conversation with a model: turn after turn through its chat template, with what was said before."""

from __future__ import annotations

import time
from collections.abc import Callable

from peftlab.errors import PeftlabError
from peftlab.pipelines.drafts.generate import GeneratedText, Writer
from peftlab.tasks.conversations import Message, chat_ids

_LEAST_ROOM = 4  # a quarter of the context is room enough for an answer, however many tokens one may have


class Chat:
    """A conversation that is being held.

    Attributes:
        messages: what was said and still fits into the model's context, oldest first.
        forgotten: turns that no longer did.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._turn = writer, 0
        self.messages: list[Message] = []
        self.forgotten = 0

    def ask(self, text: str, on_text: Callable[[str], None]) -> GeneratedText:
        """Return the model's answer to ``text``, and remember both.

        An answer that Ctrl-C stops (``KeyboardInterrupt``) is remembered as far as it was shown; its ``reason`` is
        "interrupt", and it has no tokens.

        Args:
            on_text: called with each piece of the answer as soon as it is final.

        Raises:
            PeftlabError: the text alone does not fit into the context, or the template refuses the conversation;
                nothing is remembered of it.
        """
        self.messages.append({"role": "user", "content": text})
        shown: list[str] = []

        def show(piece: str) -> None:
            shown.append(piece)
            on_text(piece)

        began = time.perf_counter()
        try:
            answer = self._writer.write(self._prompt(), show, seed=self._writer.options.seed + self._turn)
        except KeyboardInterrupt:
            answer = GeneratedText("".join(shown), [], "interrupt", time.perf_counter() - began, None, None)
        except PeftlabError:
            self.messages.pop()
            raise
        self._turn += 1
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        return answer

    def _prompt(self) -> list[int]:
        """Return the conversation's tokens, without its oldest turns where they leave no room for an answer."""
        pair, most = self._writer.pair, self._writer.options.max_new_tokens
        ids = chat_ids(pair.tokenizer, self.messages, "chat")
        if pair.target.limit is None:
            return ids
        room = pair.target.limit - min(most, pair.target.limit // _LEAST_ROOM)
        kept = self.messages
        while len(ids) > room and len(kept) > 1:
            following = next(i for i, turn in enumerate(kept) if i > 0 and turn["role"] == "user")
            kept = kept[following:]
            ids = chat_ids(pair.tokenizer, kept, "chat")
        if len(ids) >= pair.target.limit:
            raise PeftlabError(
                f"chat: this message has {len(ids)} tokens, and the model's context {pair.target.limit}: shorten it"
            )
        self.forgotten += len(self.messages) - len(kept)
        self.messages = kept
        return ids


def converse(
    writer: Writer,
    read: Callable[[], str | None],
    on_text: Callable[[str], None],
    on_answer: Callable[[GeneratedText], None],
    on_note: Callable[[str], None],
    *,
    interactive: bool,
) -> None:
    """Answer each text that ``read`` returns, until it returns None.

    Args:
        on_text: called with each piece of an answer. on_answer: with each answer. on_note: with what the user should
            know: turns that were forgotten, and mistakes.
        interactive: a person types: Ctrl-C stops an answer, not the conversation, and a mistake does not end it.

    Raises:
        PeftlabError: a text that cannot be asked, if not interactive.
    """
    chat = Chat(writer)
    while True:
        try:
            text = read()
        except KeyboardInterrupt:
            if not interactive:
                raise
            on_note("Ctrl-D ends the chat")
            continue
        if text is None:
            return
        if not text.strip():
            continue
        forgotten = chat.forgotten
        try:
            answer = chat.ask(text, on_text)
        except PeftlabError as error:
            if not interactive:
                raise
            on_note(str(error))
            continue
        on_answer(answer)
        if chat.forgotten > forgotten:
            on_note(f"the context is full: the {chat.forgotten} oldest turns are forgotten")
        if answer.reason == "interrupt" and not interactive:
            raise KeyboardInterrupt
