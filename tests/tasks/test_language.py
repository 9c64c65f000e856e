"""Language tasks: which tokens are trained, how rows are read, and that the loss is the plain one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import Tokenizer, models, pre_tokenizers
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
from peftlab.errors import PeftlabError
from peftlab.methods.injection import trainable_parameters
from peftlab.tasks.config import DataConfig
from peftlab.tasks.conversations import Completion, Conversation
from peftlab.tasks.language import LanguageEvaluation, load_language, nll, reads_head
from peftlab.tasks.language_examples import Encoding, answers, collate, encode, encode_rows
from peftlab.tasks.table import find_task

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

    @settings(max_examples=50, deadline=None)
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

    def test_too_long(self, tokenizer) -> None:
        rows = [Completion("ab", "c" * 10, "a:1"), Completion("ab", "c" * 30, "a:2")]
        data, left_out = encode_rows(rows, tokenizer, Encoding(20))
        assert len(data) == 1 and sum(left_out.values()) == 1
        data, left_out = encode_rows(rows, tokenizer, Encoding(20, "truncate"))
        assert data["length"] == [13, 20] and data["trained_tokens"] == [11, 18] and not left_out
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
    assert reads_head(model)
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
    assert not reads_head(model)
    for smoothing in (0.0, 0.1):
        found, wanted = (loss(model, inputs, label_smoothing=smoothing) for loss in (nll, plain))
        torch.testing.assert_close(found, wanted)


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
