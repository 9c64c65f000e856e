"""Files of chats with mistakes in them, through a recipe: one error that names the place, and nothing written."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftlab.errors import PeftlabError
from peftlab.pipelines import run
from peftlab.pipelines.finetune import FinetuneResults
from tests.byte_tokens import byte_tokenizer

# Has no system turn, and no tool calls.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


GOOD = {"messages": [user("q"), said("a")]}
LONG = {"messages": [user("q"), said("a " * 400)]}


def call(**function: Any) -> dict[str, Any]:
    return {"messages": [user("q"), said(None, tool_calls=[{"function": function}])]}


def shared_gpt(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": value} for name, value in turns], **more}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two tiny models, the second without a chat template."""
    directory = tmp_path_factory.mktemp("bad")
    for name, template in (("model", TEMPLATE), ("bare", None)):
        tokenizer = byte_tokenizer(template, ["<|turn|>", "<|end|>"], bos="<s>", eos="</s>")
        torch.manual_seed(0)
        sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    (directory / "recipe.yaml").write_text(
        f"model: {directory / 'model'}\ntask: text/chat\ndata: {{path: x, validation: 1}}\nmethod: {{name: lora}}\n"
        "train: {max_length: 256, max_steps: 1, eval_every: 1}\nmerge: false\noutput_dir: x\n"
    )
    return directory


def start(place: Path, out: Path, rows: list[Any] | bytes, *overrides: str) -> FinetuneResults:
    file = out.parent / "rows.jsonl"
    data = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(data)
    results = run(place / "recipe.yaml", [f"data.path={file}", f"output_dir={out}", *overrides])
    assert isinstance(results, FinetuneResults)
    return results


BAD: dict[str, tuple[list[Any], str]] = {
    "answer to nothing": ([GOOD, {"messages": [said("a")]}], r"rows\.jsonl:2: an assistant turn without a user turn"),
    "two questions": ([GOOD, {"messages": [user("q"), *GOOD["messages"]]}],
                      r":2: two user turns one after the other; the roles are user, user, assistant"),
    "late system turn": ([GOOD, {"messages": [*GOOD["messages"], {"role": "system", "content": "s"}]}],
                         ":2: a system turn after the first turn"),
    "tool without a call": ([GOOD, {"messages": [{"role": "tool", "content": "5"}, said("a")]}], ":2: a tool's answer"),
    "no answer": ([GOOD, {"messages": [user("q")]}], ":2: no assistant turn to train on; its roles are user"),
    "empty answer": ([GOOD, {"messages": [user("q"), said("  ")]}], ":2: an empty answer"),
    "empty output": ([{"instruction": "i", "output": ""}, GOOD], ":1: output is empty"),
    "null": ([GOOD, {"messages": [user("q"), said(None)]}], r":2: the content of a turn \(assistant\) is not a text"),
    "number": ([GOOD, {"messages": [user(3), said("a")]}], r":2: the content of a turn \(user\) is not a text, but 3"),
    "image": ([GOOD, {"messages": [user([{"type": "image", "url": "x"}]), said("a")]}], ":2: .*part of type 'image'"),
    "part without text": ([GOOD, {"messages": [user([{"type": "text"}]), said("a")]}], ":2: a content is a text, or"),
    "role": ([GOOD, {"messages": [user("q"), {"role": "assitant", "content": "a"}]}], r"did you mean 'assistant'\?"),
    "odd ShareGPT role": ([shared_gpt(("human", "q"), ("GPT", "a"))] * 2, r":1: role 'GPT' .*did you mean 'gpt'\?"),
    "weight": ([GOOD, {"messages": [user("q"), said("a", weight=0)]}], ":2: a turn of weight 0"),
    "two systems": ([GOOD, {"system": "s", "messages": [{"role": "system", "content": "t"}, *GOOD["messages"]]}],
                    ":2: two system turns"),
    "history": ([{"instruction": "i", "output": "o", "history": "x"}, GOOD], ":1: history is a list"),
    "input": ([{"instruction": "i", "output": "o", "input": 5}, GOOD], ":1: input is not a text, but 5"),
    "no chat in a row": ([GOOD, {"other": "x"}], ":2: no chat in it; a row has messages"),
    "quoted twice": ([{"messages": json.dumps(json.dumps(GOOD["messages"]))}] * 2, ":1: messages are a list of turns"),
    "system refused": ([GOOD, {"messages": [{"role": "system", "content": "s"}, *GOOD["messages"]]}],
                       ":2: the chat template does not take this conversation: System role not supported"),
    "tools": ([GOOD, {**GOOD, "tools": "[{name: x"}], ":2: tools: not JSON"),
    "tool without a name": ([GOOD, {**GOOD, "tools": [{"description": "x"}]}], ":2: a tool is an object with name"),
    "tools that are none": ([GOOD, {**GOOD, "tools": '"x"'}], ":2: tools are a list, not 'x'"),
    "arguments": ([GOOD, call(name="f", arguments="{bad")], ":2: the arguments of f: not JSON"),
    "arguments that are none": ([GOOD, call(name="f", arguments="[1]")], r":2: the arguments of f are not an object"),
    "call without a name": ([GOOD, call(nam="f")], r":2: a tool call without a name \(did you mean 'name'\?\)"),
    "call in text": ([GOOD, shared_gpt(("human", "q"), ("function_call", "{bad"))], ":2: tool_calls: not JSON"),
    "call by the user": ([GOOD, {"messages": [{**user("q"), "tool_calls": [1]}, said("a")]}], ":2: tool_calls in a turn"),
    "template without calls": ([GOOD, call(name="f", arguments={"x": 1})], ":2: the chat template does not write tool"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_and_nothing_is_written(place: Path, tmp_path: Path, name: str) -> None:
    rows, message = BAD[name]
    with pytest.raises(PeftlabError, match=message):
        start(place, tmp_path / "run", [*rows, GOOD])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([GOOD] * 3, ["data.messages=mesages"], r"no column 'mesages' \(data.messages\) \(did you mean 'messages'\?\)"),
        ([{"q": "x", "a": "y"}] * 3, ["data.prompt=q", "data.completion=b"], r"no column 'b' \(data.completion\)"),
        ([GOOD] * 3, ["model=BARE"], r"rows\.jsonl:\d: a chat, but the model's tokenizer has no chat template"),
        ([GOOD, GOOD, LONG], ["data.too_long=error"], r"rows\.jsonl:3: 822 tokens, and train.max_length is 256"),
        ([LONG] * 3, [], "every example is longer than train.max_length, 256 tokens"),
        (
            [{"text": "x"}] * 3,
            ["task=text/plain", "data.train_on=assistant"],
            "data.train_on: task text/plain does not",
        ),
        ([{"text": "x"}] * 3, [], "no chat in it"),
        (b"", [], "no examples"),
        (json.dumps(GOOD).encode() + b'\n{"messages": [{"role"', [], r"rows\.jsonl:2: not a JSON object"),
    ],
)
def test_bad_files_and_mappings(
    place: Path, tmp_path: Path, rows: list[Any] | bytes, overrides: list[str], message: str
) -> None:
    changed = [text.replace("BARE", str(place / "bare")) for text in overrides]
    with pytest.raises(PeftlabError, match=message):
        start(place, tmp_path / "run", rows, *changed)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_only_looks_odd_is_read(place: Path, tmp_path: Path) -> None:
    """Shapes mixed in one file, a byte order mark, CRLF, turns as JSON text and as parts, an empty input."""
    rows = [
        GOOD, shared_gpt(("human", "q"), ("gpt", "a"), system=""), {"instruction": "i", "input": "", "output": "o"},
        {"prompt": "p", "completion": "c"}, {"messages": json.dumps(GOOD["messages"])},
        {"messages": [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]), said("a", weight=1)]},
        shared_gpt(("human", "q"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "5"), ("gpt", "a")),
    ]  # fmt: skip
    data = codecs.BOM_UTF8 + "".join(json.dumps(row) + "\r\n" for row in rows).encode()
    assert start(place, tmp_path / "run", data).left_out == {}
    missing = [GOOD, {"messages": None}, GOOD, LONG, GOOD]
    results = start(place, tmp_path / "other", missing, "data.drop_missing=true")
    assert results.left_out == {"text or label missing": 1, "longer than train.max_length": 1}
    assert results.dropped_rows == 2
    results = start(place, tmp_path / "third", [GOOD, GOOD, LONG], "data.too_long=truncate")
    assert results.left_out == {}
