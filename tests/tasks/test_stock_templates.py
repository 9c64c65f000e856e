"""The chat templates of published models: what is trained is the answers with their end, or the template is refused.

The templates are files of TRL's package, which is found through its metadata and not imported.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from peftlab.errors import PeftlabError
from peftlab.tasks.conversations import Conversation, read_calls
from peftlab.tasks.language_examples import Encoding, Tokens, encode, end_of_turn, markers, shapes
from tests.byte_tokens import byte_tokenizer

_TRL = find_spec("trl")
_FILES = sorted((Path(_TRL.origin).parent / "chat_templates").glob("*.jinja")) if _TRL and _TRL.origin else []
TEMPLATES = {file.stem: file for file in _FILES if not file.stem.endswith("_training")}  # the others are TRL's own
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="TRL, whose package contains the templates, is not installed")

SPECIAL = re.compile(
    r"<\|[^|>\s]+\|>|<[a-z_]+_of_turn>|\[/?[A-Z_]+\]|<\|[a-z_]+>|<[a-z_]+\|>|</?s>|<｜[^｜]+｜>|<end_of_utterance>"
)
ASKED = ("Be brief.", "One?", "Two?", "41")


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def reasoned(content: str, thought: str) -> dict[str, Any]:
    return turn("assistant", content, reasoning_content=thought, thinking=thought)


PLAIN = [turn("user", "One?"), turn("assistant", "First answer"), turn("user", "Two?"), turn("assistant", "Second")]
CALL = [{"id": "abcdefghi", "function": {"name": "add", "arguments": '{"number": 73}'}}]
CASES: dict[str, list[dict[str, Any]]] = {
    "plain": PLAIN,
    "system": [turn("system", "Be brief."), *PLAIN],
    "reasoning": [PLAIN[0], reasoned("First answer", "hmm1"), PLAIN[2], reasoned("Second", "hmm2")],
    "tools": [
        turn("user", "One?"), turn("assistant", "", tool_calls=read_calls(CALL, "x")),
        turn("tool", "41", name="add", tool_call_id="abcdefghi"), turn("assistant", "Second"),
    ],
}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"number": {"type": "integer", "description": "What."}}, "required": ["number"]}}}]  # fmt: skip
_ROLES, _CALLS, _NOT_TAKEN = "Conversation roles must alternate", "does not write tool calls", "does not take this"
REFUSED = {
    ("gemma", "system"): "System role not supported",
    ("cohere", "tools"): _ROLES, ("cohere2", "tools"): _ROLES, ("gemma", "tools"): _ROLES, ("gemma3", "tools"): _ROLES,
    ("deepseek_r1_distill", "tools"): _CALLS, ("lfm2", "tools"): _CALLS, ("llama3", "tools"): _CALLS,
    ("phi3", "tools"): _CALLS, ("phi3_5", "tools"): _CALLS, ("qwen2_5_vl", "tools"): _CALLS,
    ("idefics3", "tools"): _NOT_TAKEN, ("llava_next", "tools"): _NOT_TAKEN, ("smolvlm", "tools"): _NOT_TAKEN,
}  # fmt: skip


def tokenizer_of(name: str) -> Any:
    template = TEMPLATES[name].read_text(encoding="utf-8")
    return byte_tokenizer(template, sorted(set(SPECIAL.findall(template))), bos="<s>", eos="</s>", adds_bos=True)


def trained_texts(tokens: Tokens, tokenizer: Any) -> list[str]:
    """Return what is trained, a text for each run of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, trained in zip(tokens.input_ids, tokens.trained, strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_there_are_enough_templates() -> None:
    assert len(TEMPLATES) >= 25 and {name for name, _ in REFUSED} <= TEMPLATES.keys()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_alone_are_trained(name: str, case: str) -> None:
    tokenizer = tokenizer_of(name)
    row = Conversation(CASES[case], "rows.jsonl:3", TOOLS if case == "tools" else [])
    if (name, case) in REFUSED:
        with pytest.raises(PeftlabError, match=f"^rows.jsonl:3: .*{REFUSED[name, case]}"):
            encode(row, tokenizer, Encoding(10**6))
        return
    examples = encode(row, tokenizer, Encoding(10**6))
    found = sorted((t for tokens in examples for t in trained_texts(tokens, tokenizer)), key=lambda t: "Second" in t)
    assert len(found) == 2, "each answer once"
    first = ("add", "73") if case == "tools" else ("First answer",)
    assert all(text in found[0] for text in first) and "Second" not in found[0]
    assert "Second" in found[1] and not any(text in found[1] for text in first)
    assert not any(text in answer for text in ASKED for answer in found), "nothing that was asked"
    specials = markers(tokenizer)
    assert all(any(answer.endswith(marker) for marker in specials) for answer in found), "the model learns to end"
    for tokens in examples:
        assert tokens.input_ids.count(tokenizer.bos_token_id) <= 1, "no second BOS"
        assert tokens.input_ids in formatted(row, tokenizer, len(tokens.input_ids)), "the ids of apply_chat_template"


def formatted(row: Conversation, tokenizer: Any, length: int) -> list[list[int]]:
    """Return the first ``length`` ids that transformers makes of the conversation up to each turn, EOS added or not."""
    made = []
    for shape in shapes(row.messages):
        for n in range(2, len(row.messages) + 1):
            try:
                ids = tokenizer.apply_chat_template(shape(row.messages[:n]), tools=row.tools or None)["input_ids"]
            except Exception:  # this form is not the template's
                continue
            made += [ids[:length], [*ids[: length - 1], tokenizer.eos_token_id]]
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_generation_ends_where_training_ended(name: str) -> None:
    """The token that ends a chat's answer is one that ends a trained answer."""
    tokenizer = tokenizer_of(name)
    (tokens,) = encode(Conversation([turn("user", "a"), turn("assistant", "b")], "x"), tokenizer, Encoding(10**6))
    ends = end_of_turn(tokenizer) or {tokenizer.eos_token_id}
    after = [token for token, trained in zip(tokens.input_ids, tokens.trained, strict=True) if trained]
    assert ends <= set(after[-2:])
