"""Language tasks: chats as files have them, chat templates of real models, tokens, losses and scores."""

from __future__ import annotations

import codecs
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
)

import peftlab
from peftlab.drafting.target import forward_hidden
from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters
from peftlab.models.costs import CountFlops
from peftlab.pipelines.finetune import FinetuneResults
from peftlab.pipelines.recipes import run
from peftlab.tasks.batches import SplitRows
from peftlab.tasks.conversations import Completion, Conversation, as_conversation, read_calls
from peftlab.tasks.language import LanguageEvaluation, head_is_separable, load_language, nll
from peftlab.tasks.language_examples import (
    Encoding,
    Tokens,
    answers,
    collate,
    encode,
    encode_rows,
    end_of_turn,
    markers,
    shapes,
    template_of,
)
from peftlab.tasks.table import DataConfig, find_task
from tests.byte_tokens import byte_tokenizer

# --- Language tasks: which tokens are trained, how rows are read, and that the loss is the plain one.
MARKERS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning of all but the last answer is removed, as Qwen 3 does.
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt opens reasoning, which an answer without any lacks.
OPENS = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
# The next role's marker is what ends a turn.
NEXT = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": " First answer "},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second"},
]


def form(template: str):
    compiled = Environment().from_string(template)
    return lambda messages, prompted: compiled.render(messages=messages, add_generation_prompt=prompted)


def trained(template: str, **options) -> list[list[str]]:
    return [[f.text[a:b] for a, b in f.spans] for f in answers(TURNS, form(template), MARKERS, **options)]


class TestAnswers:
    def test_each_answer_with_its_end_marker(self) -> None:
        assert trained(CHATML) == [[" First answer <|im_end|>", "Second<|im_end|>"]]
        assert trained(CHATML, train_on="last") == [["Second<|im_end|>"]]
        assert trained(TRIMS) == [["First answer<|im_end|>", "Second<|im_end|>"]]
        whole = form(CHATML)(TURNS, False)
        assert trained(CHATML, train_on="all") == [[whole]]

    def test_rewritten_history_is_an_example_per_answer(self) -> None:
        found = answers(TURNS, form(REWRITES), MARKERS)
        assert [[f.text[a:b] for a, b in f.spans] for f in found] == [
            ["<think>\n\n</think>\n\nSecond<|im_end|>"],
            ["<think>\n\n</think>\n\n First answer <|im_end|>"],
        ]
        assert found[1].text == form(REWRITES)(TURNS[:3], False).rstrip("\n"), "as at inference"

    def test_a_prompt_that_opens_reasoning_is_cut_where_it_differs(self) -> None:
        assert trained(OPENS) == [[" First answer <|im_end|>", "Second<|im_end|>"]]

    def test_the_next_roles_marker_ends_a_turn(self) -> None:
        found = answers(TURNS, form(NEXT), MARKERS)
        assert [[f.text[a:b] for a, b in f.spans] for f in found] == [[" First answer <s>"], ["Second"]]
        assert [f.ends for f in found] == [False, True], "the last one is ended by the end-of-sequence token"

    def test_a_template_that_drops_the_text_is_refused(self) -> None:
        for role, said in (("assistant", "an answer"), ("system", "a system turn"), ("user", "a user turn")):
            drops = CHATML.replace("{{ m.content }}", f"{{% if m.role != '{role}' %}}{{{{ m.content }}}}{{% endif %}}")
            for train_on in ("assistant", "last", "all"):
                with pytest.raises(PeftlabError, match=f"does not write the text of {said}"):
                    answers(TURNS, form(drops), MARKERS, train_on)

    def test_a_template_that_changes_earlier_turns_is_refused(self) -> None:
        changes = "{{ messages | length }}" + CHATML
        with pytest.raises(PeftlabError, match="in another way once the answer follows"):
            answers(TURNS, form(changes), MARKERS)
        with pytest.raises(PeftlabError, match="no assistant turn"):
            answers(TURNS[:2], form(CHATML), MARKERS)

    @settings(max_examples=50)
    @given(st.lists(st.text(st.characters(categories=["L", "N", "Zs"]), min_size=1), min_size=1, max_size=4))
    def test_what_is_trained_is_what_the_model_would_write(self, texts: list[str]) -> None:
        turns = [
            t for text in texts for t in ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
        ]
        (found,) = answers(turns, form(CHATML), MARKERS)
        assert [found.text[a:b] for a, b in found.spans] == [f"{text}<|im_end|>" for text in texts]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with ChatML's markers."""
    letters = {chr(i): i - 32 + 4 for i in range(32, 127)} | {"\n": 99}
    vocabulary = {name: i for i, name in enumerate(MARKERS)} | letters
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own.add_special_tokens(MARKERS)
    made = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", additional_special_tokens=MARKERS[:2]
    )
    made.chat_template = CHATML
    return made


def shown(tokens, tokenizer) -> str:
    return "".join(
        tokenizer.convert_ids_to_tokens(i) for i, kept in zip(tokens.input_ids, tokens.trained, strict=True) if kept
    )


class TestTokens:
    def test_ids_are_the_templates_and_marks_the_answers(self, tokenizer) -> None:
        (tokens,) = encode(Conversation(TURNS, "x"), tokenizer, Encoding(500))
        whole = tokenizer.apply_chat_template(TURNS, tokenize=False)
        assert tokens.input_ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert shown(tokens, tokenizer) == " First answer <|im_end|>Second<|im_end|>"
        assert tokens.trained_bytes == len(" First answer Second")

    def test_a_completion_ends_and_begins_as_the_tokenizer_says(self, tokenizer) -> None:
        (tokens,) = encode(Completion("ab|", "cd", "x"), tokenizer, Encoding(500))
        assert shown(tokens, tokenizer) == "cd</s>" and len(tokens.input_ids) == 6
        (plain,) = encode(Completion("", "abc", "x"), tokenizer, Encoding(500))
        assert shown(plain, tokenizer) == "bc</s>", "nothing predicts the first token"
        assert (tokens.trained_bytes, plain.trained_bytes) == (2, 2), "its bytes do not count"

    def test_too_long(self, tokenizer) -> None:
        rows = [Completion("ab", "c" * 10, "a:1"), Completion("ab", "c" * 30, "a:2")]
        data, counted = encode_rows(rows, tokenizer, Encoding(20))
        assert len(data) == 1 and counted == SplitRows(1, {"longer than train.max_length": 1}, longest=33)
        data, counted = encode_rows(rows, tokenizer, Encoding(20, "truncate"))
        assert data["length"] == [13, 20] and data["trained_tokens"] == [11, 18]
        assert counted == SplitRows(2, truncated=1, longest=33)
        asked = Completion("a" * 30, "c", "a:3")
        _, counted = encode_rows([*rows, asked], tokenizer, Encoding(20, "truncate"))
        assert counted == SplitRows(2, {"no trained token within train.max_length": 1}, truncated=1, longest=33)
        with pytest.raises(PeftlabError, match=r"is longer than train\.max_length, 12 tokens; the shortest has 13"):
            encode_rows(rows, tokenizer, Encoding(12))
        with pytest.raises(
            PeftlabError, match=r"no example has a trained token within .*, 20 tokens; the shortest has 32"
        ):
            encode_rows([asked], tokenizer, Encoding(20, "truncate"))
        with pytest.raises(PeftlabError, match=r"a:2: 33 tokens, and train\.max_length is 20"):
            encode_rows(rows, tokenizer, Encoding(20, "error"))
        data, _ = encode_rows([Completion("", "c" * 45, "a:1")], tokenizer, Encoding(20, split=True))
        assert data["length"] == [20, 20, 6] and data["trained_tokens"] == [19, 19, 5]

    def test_no_template(self, tokenizer) -> None:
        import copy

        bare = copy.deepcopy(tokenizer)
        bare.chat_template = None
        with pytest.raises(PeftlabError, match="a:7: a chat, but the model's tokenizer has no chat template"):
            encode(Conversation(TURNS, "a:7"), bare, Encoding(100))

    def test_a_row_sets_variables_of_its_template(self, tokenizer) -> None:
        import copy

        thinking = copy.deepcopy(tokenizer)
        thinking.chat_template = CHATML + "{% if quiet %}{{ '(quiet)' }}{% endif %}"

        def form(value: object) -> str:
            row = as_conversation(TURNS, {"chat_template_kwargs": value}, "a:7")
            return template_of(row, thinking)(list, TURNS, False)

        assert form({"quiet": True}) == form('{"quiet": true}') == form(None) + "(quiet)"
        assert form({"quiet": None}) == form({}) == form(None)
        with pytest.raises(
            PeftlabError, match="a:7: chat_template_kwargs: 'tokenize' is no variable that a row may set"
        ):
            form({"tokenize": True})
        with pytest.raises(
            PeftlabError, match="a:7: chat_template_kwargs are an object of the template's variables, not"
        ):
            form([1])


ROWS = {
    "messages": {"messages": TURNS},
    "sharegpt": {"system": "Be brief.", "conversations": [
        {"from": "human", "value": "One?"}, {"from": "gpt", "value": " First answer "},
        {"from": "human", "value": "Two?"}, {"from": "gpt", "value": "Second"},
    ]},
    "alpaca": {"instruction": "Two?", "input": "", "output": "Second", "system": "Be brief.",
               "history": [["One?", " First answer "]]},
    "prompt and completion": {"prompt": TURNS[:4], "completion": TURNS[4:]},
}  # fmt: skip


class TestRows:
    def read(self, tmp_path: Path, rows: list[dict], name: str = "text/chat", **options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(path=str(file), **({"validation": 1} | options))
        return load_language(find_task(name), data)

    @pytest.mark.parametrize("shape", ROWS)
    def test_every_shape_is_the_same_chat(self, tmp_path: Path, shape: str) -> None:
        _, splits, left_out = self.read(tmp_path, [ROWS[shape]] * 3)
        assert [len(rows) for rows in splits.values()] == [2, 1] and not left_out
        assert splits["train"][0].messages == TURNS

    @pytest.mark.parametrize(
        ("turns", "message"),
        [
            ([{"role": "bot", "content": "x"}], r"rows\.jsonl:1: role 'bot' is none of"),
            (TURNS[:1] + TURNS[2:3], "an assistant turn without a user turn"),
            ([TURNS[1], TURNS[1], TURNS[2]], "two user turns"),
            ([TURNS[1], {"role": "assistant", "content": " "}], "an empty answer"),
            ([TURNS[1], {"role": "assistant", "content": 3}], "is not a text, but 3"),
            ("no", "messages are not JSON"),
        ],
    )
    def test_bad_turns(self, tmp_path: Path, turns, message: str) -> None:
        with pytest.raises(PeftlabError, match=message):
            self.read(tmp_path, [{"messages": turns}] * 2)

    def test_unknown_columns_and_words_for_numbers(self, tmp_path: Path) -> None:
        with pytest.raises(PeftlabError, match="no chat in it"):
            self.read(tmp_path, [{"a": "b"}] * 2)
        rows = [{"q": "good", "n": 2.0}, {"q": "bad", "n": -2.0}, {"q": "meh", "n": 0.0}]
        bins = {"no": (None, -1), "yes": (1, None)}
        _, splits, left_out = self.read(tmp_path, rows, prompt="q", completion="n", bins=bins)
        found = {row.messages[0]["content"]: row.messages[1]["content"] for rows in splits.values() for row in rows}
        assert found == {"good": "yes", "bad": "no"} and left_out == {"outside every bin": 1}

    def test_plain_text_files(self, tmp_path: Path) -> None:
        (tmp_path / "train.txt").write_text("One\ntwo.\n\nThree.\n\n\n\nFour.\n")
        _, splits, _ = load_language(
            find_task("text/plain"), DataConfig(path=str(tmp_path / "train.txt"), validation=1)
        )
        everything = sorted(row.completion for rows in splits.values() for row in rows)
        assert everything == ["Four.", "One\ntwo.", "Three."]
        (tmp_path / "windows.txt").write_bytes(b"One\r\ntwo.\r\n\r\nThree.\r\n")
        data = DataConfig(path=str(tmp_path / "windows.txt"), validation=1)
        _, splits, _ = load_language(find_task("text/plain"), data)
        assert sorted(row.completion for rows in splits.values() for row in rows) == ["One\ntwo.", "Three."]


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gpt2, tied": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
    "gemma2, capped": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0)),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.3)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0)),
    "phi, biased": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    "opt, projected": lambda: OPTForCausalLM(OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=16)),
}  # fmt: skip


def batch(n: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = [
        {
            "input_ids": torch.randint(3, 64, (length,), generator=generator).tolist(),
            "trained": [i > 2 for i in range(length)],
        }
        for length in range(6, 6 + n)
    ]
    return collate(rows, pad=0)


def plain(model, inputs, *, label_smoothing: float = 0.0) -> torch.Tensor:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1].float()
    labels = inputs["input_ids"][:, 1:].masked_fill(~inputs["trained"][:, 1:], -100)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [["q_proj", "c_attn"], ["lm_head"]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_chunked_loss_is_the_plain_one(
    name: str, targets: list[str], smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradients, with soft caps and scales, a tied head, LoRA on the head, and several chunks."""
    monkeypatch.setattr("peftlab.tasks.language._CHUNK", 7)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    names = [t for t in targets if any(n.endswith(t) for n, _ in model.named_modules())]
    peftlab.inject_lora(model, r=2, target_modules=names, bias="lora_only")
    for parameter in trainable_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.2)
    assert head_is_separable(model)
    inputs, gradients, values = batch(), [], []
    for loss in (plain, nll):
        model.zero_grad()
        value = loss(model, inputs, label_smoothing=smoothing) / 3
        value.backward()
        values.append(value.item())
        gradients.append({n: p.grad.clone() for n, p in trainable_parameters(model).items()})
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][key], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=key
        )


def test_a_head_that_is_more_than_a_product_takes_plain_logits() -> None:
    torch.manual_seed(0)

    class Shifted(LlamaForCausalLM):
        def forward(self, *arguments, **options):
            output = super().forward(*arguments, **options)
            output.logits = output.logits + torch.arange(64.0)
            return output

    model, inputs = Shifted(LlamaConfig(**SMALL)).eval(), batch()
    assert not head_is_separable(model)
    for smoothing in (0.0, 0.1):
        found, wanted = (loss(model, inputs, label_smoothing=smoothing) for loss in (nll, plain))
        torch.testing.assert_close(found, wanted)


def test_the_trial_of_the_lm_head_is_no_part_of_a_steps_cost() -> None:
    model, flops = LlamaForCausalLM(LlamaConfig(**SMALL)), []
    for _ in range(2):
        with CountFlops() as counter:
            nll(model, batch())
        flops.append(counter.flops)
    assert flops[0] == flops[1] > 0


def test_scores_do_not_depend_on_the_batches(tokenizer) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 128})).eval()
    rows = [Completion("ab", "cd" * n, "x") for n in range(1, 8)]
    data, _ = encode_rows(rows, tokenizer, Encoding(50))
    found = [
        LanguageEvaluation({"validation": data}, lambda r: collate(r, pad=0), size).score(model)["validation"]
        for size in (1, 3, 7)
    ]
    for scores in found[1:]:
        assert scores == pytest.approx(found[0], rel=1e-5)
    total = sum(float(nll(model, collate([data[i]], pad=0))) for i in range(len(data)))
    assert found[0]["loss"] == pytest.approx(total / sum(data["trained_tokens"]), rel=1e-5)
    assert found[0]["bits_per_byte"] == pytest.approx(total / 0.6931472 / sum(2 * n for n in range(1, 8)), rel=1e-5)


def test_scoring_copies_no_head_for_each_row() -> None:
    """torch multiplies a slice of states by the weight repeated for each row, where it is frozen."""
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 512})).eval().requires_grad_(False)
    inputs = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(6, 5, dtype=torch.long))
    inputs["trained"] = torch.ones(6, 5, dtype=torch.bool)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with torch.no_grad():
        nll(model, inputs)  # which also finds out how the model reads its head
        with Watch():
            nll(model, inputs)
            assert largest == model.lm_head.weight.numel()
            forward_hidden(model, inputs["input_ids"], inputs["attention_mask"])
            assert largest == model.lm_head.weight.numel()
            model(inputs["input_ids"], logits_to_keep=1)
            assert largest == 6 * model.lm_head.weight.numel()


# --- Files of chats with mistakes in them, through a recipe: one error that names the place, and nothing written.
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
    "image": ([GOOD, {"messages": [user([{"type": "image", "url": "x"}]), said("a")]}], r":2: .*\{type: image, path: ...\}"),
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


def test_what_only_looks_odd_is_read(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    capsys.readouterr()
    results = start(place, tmp_path / "other", missing, "data.drop_missing=true")
    assert results.left_out == {"text or label missing": 1, "longer than train.max_length": 1}
    assert results.dropped_rows == 2
    printed = capsys.readouterr().out
    sizes = {split: rows.rows for split, rows in results.splits.items()}
    assert sizes == {"train": 2, "validation": 1} and "rows: train 2, validation 1\n" in printed
    assert "left out: 1 of 3 training rows (longer than train.max_length, " in printed
    assert "left out: 1 rows (text or label missing)" in printed
    results = start(place, tmp_path / "third", [GOOD, GOOD, LONG], "data.too_long=truncate")
    assert results.left_out == {}


# --- The chat templates of published models: what is trained is the answers with their end, or the template is refused.
_TRL = find_spec("trl")
_FILES = sorted((Path(_TRL.origin).parent / "chat_templates").glob("*.jinja")) if _TRL and _TRL.origin else []
TEMPLATES = {file.stem: file for file in _FILES if not file.stem.endswith("_training")}  # the others are TRL's own
templates = pytest.mark.skipif(not TEMPLATES, reason="TRL, whose package contains the templates, is not installed")

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


@templates
def test_there_are_enough_templates() -> None:
    assert len(TEMPLATES) >= 25 and {name for name, _ in REFUSED} <= TEMPLATES.keys()


@templates
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


@templates
@pytest.mark.parametrize("name", TEMPLATES)
def test_generation_ends_where_training_ended(name: str) -> None:
    """The token that ends a chat's answer is one that ends a trained answer."""
    tokenizer = tokenizer_of(name)
    (tokens,) = encode(Conversation([turn("user", "a"), turn("assistant", "b")], "x"), tokenizer, Encoding(10**6))
    ends = end_of_turn(tokenizer) or {tokenizer.eos_token_id}
    after = [token for token, trained in zip(tokens.input_ids, tokens.trained, strict=True) if trained]
    assert ends <= set(after[-2:])
