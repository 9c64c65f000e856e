"""Text by the target: the same however often it was interrupted, and masks that end where it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import requests, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from peftlab.drafting import text
from peftlab.drafting.objectives import topk_targets
from peftlab.drafting.text import (
    Collate,
    WritingSettings,
    check_room,
    make_dataset,
    model_digest,
    stored_topk,
    write_continuations,
)
from peftlab.errors import PeftlabError
from peftlab.tasks.prompts import read_prompt_ids, read_requests

EOS = frozenset({2})
PROMPTS = [[5, 6, 7], [9], [11, 12], [3, 4, 5, 6], [8, 8]]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resumed_equals_uninterrupted(tmp_path: Path, monkeypatch: Any, temperature: float) -> None:
    target = tiny()
    writing = WritingSettings(6, temperature, samples=1 if temperature == 0 else 3, batch_size=2)
    directory, whole = write_continuations(target, PROMPTS, writing, tmp_path / "whole", EOS)

    calls = []
    real = text.decode

    def stops(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(text, "decode", stops)
    with pytest.raises(KeyboardInterrupt):
        write_continuations(target, PROMPTS, writing, tmp_path / "cut", EOS)
    done = len(calls)
    other, resumed = write_continuations(target, PROMPTS, writing, tmp_path / "cut", EOS)
    assert resumed == whole and contents(other) == contents(directory)
    assert [r.prompt for r in whole] == [p for p in PROMPTS for _ in range(writing.samples)]
    before = len(calls)
    assert write_continuations(target, PROMPTS, writing, tmp_path / "cut", EOS)[1] == whole
    assert done == 3 and len(calls) == before, "what is on disk is not written again"
    longer, more = write_continuations(target, [*PROMPTS, [7]], writing, tmp_path / "cut", EOS)
    assert longer == other and more[: len(whole)] == whole and len(calls) <= before + 2, "but for the part that ends it"


def test_greedy_text_is_what_transformers_writes(stories: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(stories).eval()
    tokenizer = AutoTokenizer.from_pretrained(stories)
    prompts = read_prompt_ids(["Once upon a time", "Tom had a big dog"], tokenizer, chat=False)
    _, ours = write_continuations(target, prompts, WritingSettings(24), tmp_path, EOS)
    for prompt, request in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert request.response == theirs[0, len(prompt) :].tolist()


def test_another_target_or_setting_is_another_data_set(tmp_path: Path) -> None:
    target, changed = tiny(), tiny()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    made = {write_continuations(m, PROMPTS, w, tmp_path, EOS)[0]
            for m, w in ((target, WritingSettings(4)), (changed, WritingSettings(4)), (target, WritingSettings(5)))}  # fmt: skip
    assert len(made) == 3
    assert write_continuations(target, PROMPTS, WritingSettings(4), tmp_path, EOS)[0] in made


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    directory, _ = write_continuations(tiny(), PROMPTS, WritingSettings(4, batch_size=2), tmp_path, EOS)
    (part,) = directory.glob("part-000001-*.jsonl")
    part.write_text('{"prompt_ids"')
    with pytest.raises(PeftlabError, match=r"part-000001-\w+\.jsonl: damaged"):
        write_continuations(tiny(), PROMPTS, WritingSettings(4, batch_size=2), tmp_path, EOS)


def test_too_long() -> None:
    check_room([10, 12], 12, "the context")
    check_room([10, 12], None, "the context")
    with pytest.raises(
        PeftlabError, match="2 of 3 examples are longer than 10 tokens, the context; the first is number 2"
    ):
        check_room([10, 12, 11], 10, "the context")


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5))
def test_masks_cover_the_continuation_alone_even_where_padding_is_eos(sizes: list[tuple[int, int]]) -> None:
    from peftlab.tasks.prompts import Request

    rows = make_dataset([Request([2] * p, [*[2] * (r - 1), 2]) for p, r in sizes])  # every token is the EOS
    batch = Collate(pad=2)([rows[i] for i in range(len(rows))])
    for i, (p, r) in enumerate(sizes):
        places = batch["weights"][i].nonzero().flatten().tolist()
        assert [place + 1 for place in places] == list(range(p, p + r)), "each token of the response is predicted once"
        assert int(batch["attention_mask"][i].sum()) == p + r
    assert int(batch["weights"].sum()) == sum(rows["kept"])


def test_a_model_of_other_rotations_computes_something_else() -> None:
    one, other = tiny(), tiny()
    assert model_digest(one) == model_digest(other)
    other.config.rope_parameters["rope_theta"] = 5e5
    assert model_digest(one) != model_digest(other)


def test_stored_top_k_is_the_targets_own(tmp_path: Path) -> None:
    target, rows = tiny(), requests(5)
    first = stored_topk(target, rows, 4, tmp_path)
    again = stored_topk(target, rows, 4, tmp_path)
    for request, top, kept in zip(rows, first, again, strict=True):
        ids = torch.tensor([[*request.prompt, *request.response]])
        with torch.no_grad():
            logits = target(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
        exact = topk_targets(logits, 4)
        for one, other, stored in zip(exact, top, kept, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
            assert torch.equal(other, stored)
    with pytest.raises(PeftlabError, match=r"top_k: 41 is outside 1\.\.40"):
        stored_topk(target, rows, 41, tmp_path)


class TestPrompts:
    """Reading prompts and served requests."""

    @pytest.fixture(scope="class")
    def tokenizer(self, stories: Path) -> Any:
        return AutoTokenizer.from_pretrained(stories)

    def test_the_same_prompts_in_every_form(self, tokenizer: Any, tmp_path: Path) -> None:
        texts = ["Once upon a time", "The cat"]
        (tmp_path / "p.txt").write_text("\n".join(texts) + "\n\n")
        (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{t}"}}\n' for t in texts))
        (tmp_path / "q.jsonl").write_text("".join(f'{{"question": "{t}", "answer": "x"}}\n' for t in texts))
        expected = [tokenizer(t)["input_ids"] for t in texts]
        for source in (texts, str(tmp_path / "p.txt"), str(tmp_path / "p.jsonl"), str(tmp_path / "q.jsonl")):
            assert read_prompt_ids(source, tokenizer) == expected

    def test_chats_and_ids_in_a_csv_file(self, tokenizer: Any, tmp_path: Path) -> None:
        ids = tokenizer("The cat")["input_ids"]
        (tmp_path / "p.csv").write_text(f'prompt_ids\n"{ids}"\n')
        assert read_prompt_ids(str(tmp_path / "p.csv"), tokenizer) == [ids]
        (tmp_path / "m.csv").write_text('turns\n"[""The cat"", ""And then?""]"\n')
        (tmp_path / "m.jsonl").write_text('{"turns": ["The cat", "And then?"]}\n')
        one, other = (read_prompt_ids(str(tmp_path / f"m.{kind}"), tokenizer) for kind in ("csv", "jsonl"))
        assert one == other

    def test_a_text_with_columns_in_braces_is_filled_by_each_row(self, tokenizer: Any, tmp_path: Path) -> None:
        path = tmp_path / "cities.csv"
        path.write_text("city,state\nTroy,Ohio\nBath {city},Maine\nParis,Texas\n")
        field = "Where is {city}, {state}? In {state}!"
        expected = ["Where is Troy, Ohio? In Ohio!", "Where is Bath {city}, Maine? In Maine!"]
        found = read_prompt_ids(str(path), tokenizer, field=field, most=2)
        assert found == [tokenizer(text)["input_ids"] for text in expected]
        with pytest.raises(PeftlabError, match=r"no column 'town' \(data.field\).*columns: city, state"):
            read_prompt_ids(str(path), tokenizer, field="Where is {town}?")
        path.write_text("city,state\nTroy,Ohio\nBath,\n")
        with pytest.raises(PeftlabError, match=r"cities.csv:3: state is empty; data.field puts it into a prompt"):
            read_prompt_ids(str(path), tokenizer, field=field)
        assert len(read_prompt_ids(str(path), tokenizer, field=field, most=1)) == 1

    def test_chat_messages_go_through_the_template(self, tokenizer: Any, tmp_path: Path) -> None:
        path = tmp_path / "m.jsonl"
        path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
        with pytest.raises(PeftlabError, match="no chat template"):
            read_prompt_ids(str(path), tokenizer)
        chatty = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        chatty.chat_template = (
            "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}bot: "
        )
        expected = tokenizer("<s>user: Hi</s>bot: ", add_special_tokens=False)["input_ids"]
        assert read_prompt_ids(str(path), chatty) == [expected]
        assert read_prompt_ids(["Hi"], chatty) == [expected]
        assert read_prompt_ids(["Hi"], chatty, chat=False) == [tokenizer("Hi")["input_ids"]]

    def test_a_template_that_raises_is_told_with_its_row(self, tokenizer: Any, tmp_path: Path) -> None:
        strict = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
        strict.chat_template = (
            "{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users speak') }}{% endif %}"
            "{{ m['content'] }}{% endfor %}"
        )
        path = tmp_path / "m.jsonl"
        rows = [[{"role": role, "content": "Hi"}] for role in ("user", "system")]
        path.write_text("".join(f'{{"messages": {json.dumps(messages)}, "response": "x"}}\n' for messages in rows))
        for read in (read_prompt_ids, read_requests):
            with pytest.raises(PeftlabError, match=r"m\.jsonl:2: the tokenizer's chat template .*: only users speak"):
                read(str(path), strict)
        strict.chat_template = "{% for m in messages %}"
        with pytest.raises(PeftlabError, match=r"m\.jsonl:1: the tokenizer's chat template .*endfor"):
            read_prompt_ids(str(path), strict)
        strict.chat_template = "{{ missing.field.of }}"
        with pytest.raises(PeftlabError, match=r"data\.prompts, prompt 1: .*'missing' is undefined"):
            read_prompt_ids(["Hi"], strict)

    def test_a_request_without_a_response_is_not_the_word_none(self, tokenizer: Any, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        path.write_text('{"prompt": "The cat", "response": null}\n')
        with pytest.raises(PeftlabError, match=r"log\.jsonl:1: the response is not a text .* but None"):
            read_requests(path, tokenizer)

    def test_requests_end_with_the_end_of_sequence_unless_cut(self, tokenizer: Any, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        path.write_text(
            '{"prompt": "The cat", "response": " sat", "finish_reason": "stop"}\n'
            '{"prompt": "The cat", "response": " sat", "finish_reason": "length"}\n'
        )
        stopped, cut = read_requests(path, tokenizer)
        assert stopped.response == [*cut.response, tokenizer.eos_token_id]
        ids = tmp_path / "ids.jsonl"
        ids.write_text('{"prompt_ids": [5, 6], "response_ids": [7]}\n')
        assert read_requests(ids, tokenizer)[0].response == [7]

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("empty.txt", "\n\n", "no prompt in it"),
            ("empty.jsonl", "", "no prompt in it"),
            ("blank.jsonl", '{"prompt": "  "}\n', r"blank\.jsonl:1: empty"),
            ("null.jsonl", '{"prompt": "x"}\n{"prompt": null}\n', r"null\.jsonl:2: no prompt; a row needs one of"),
            ("other.jsonl", '{"sentence": "x"}\n', "no prompt column"),
        ],
    )
    def test_bad_files(self, tokenizer: Any, tmp_path: Path, name: str, text: str, message: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(PeftlabError, match=message):
            read_prompt_ids(str(tmp_path / name), tokenizer)
