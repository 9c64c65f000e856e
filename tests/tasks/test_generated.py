"""Generated answers: which prompts are asked, and that each metric is what its definition says."""

from __future__ import annotations

import math
import random
from decimal import Decimal

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peftlab.errors import PeftlabError
from peftlab.tasks.conversations import Completion, Conversation
from peftlab.tasks.generated import (
    Answer,
    check_packages,
    cider,
    cider_scores,
    final_number,
    gsm8k,
    gsm8k_peft,
    make_contexts,
    peft_answer,
    score,
)
from peftlab.tasks.language_examples import Encoding, encode
from peftlab.tasks.table import GENERATION_METRICS, GenerateConfig, GenerationMetric

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters, with a chat template."""
    vocabulary = {chr(i): i for i in range(128)}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", additional_special_tokens=["<end>"])
    made.chat_template = TEMPLATE
    return made


PEFT = [
    ("The answer is: 16", 16.0),
    ("so\nThe answer is 3/4.", 0.75),
    ("The final answer is: $50%", 50.0),
    ("#### 1,000", "1,000"),  # commas stay, so that it is no number
    ("#### 72\nThe answer is 5", 5.0),  # the order of the phrases decides, not that of the text
    ("The answer is 5\nbut then The answer is 6\nor so", 6.0),  # the last occurrence, its first line
    ("#### 72!", 72.0),
    ("The answer is 1/0", "1/0"),
    ("The answer is 1/2/3", "1/2/3"),
    ("The answer is: blue.", "blue"),
    ("72", None),
]


@pytest.mark.parametrize(("text", "expected"), PEFT)
def test_answers_as_peft_reads_them(text: str, expected: object) -> None:
    assert peft_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 1,000", "1000"),
        ("#### $1,234.50.", "1234.50"),
        ("#### 3\nor #### -7 in all", "-7"),
        ("#### 72.", "72"),
        ("The answer is 72", None),
        ("#### many", None),
    ],
)
def test_final_numbers(text: str, expected: str | None) -> None:
    assert final_number(text) == (None if expected is None else Decimal(expected))


def test_both_parsers_score_the_same_answers() -> None:
    gold = ("6 * 12 = 72\n#### 1,072",)
    answers = [
        Answer("#### 1072.0", "Q", gold),
        Answer("#### 1,072", "Q", gold),
        Answer("I do not know", "Say: #### 1,072\nAnswer: ", gold),  # the prompt is searched by peft's
        Answer("The answer is 7\n#### 1,072", "Q", gold),
    ]
    assert gsm8k(answers) == [1, 1, 0, 1]
    assert gsm8k_peft(answers) == [0, 1, 1, 0]
    with pytest.raises(PeftlabError, match="'It is 5' does not end with '#### ' and a number"):
        score(["gsm8k"], [Answer("#### 5", "Q", ("It is 5",))])


def test_means_have_an_interval() -> None:
    answers = [Answer(str(i % 4), "Q", ("0",)) for i in range(200)]
    values = score(["exact_match"], answers)
    assert values["exact_match"] == 0.25
    half_width = 1.96 * math.sqrt(0.25 * 0.75 / 200)
    assert values["exact_match_low"] == pytest.approx(0.25 - half_width, abs=0.01)
    assert values["exact_match_high"] == pytest.approx(0.25 + half_width, abs=0.01)
    assert score(["exact_match"], answers[:1]) == {"exact_match": 1.0}


class TestCider:
    def test_by_hand(self) -> None:
        pairs = [("a b", ["a b"]), ("c d d d", ["c d"])]
        scores = cider_scores([(c.split(), [r.split() for r in refs]) for c, refs in pairs])
        # Every n-gram is in one context of two, so that all weights are log 2 and cancel.
        clipped = 2 / math.sqrt(10 * 2) + 1 / math.sqrt(5)
        assert scores == pytest.approx([10 / 4 * 2, 10 / 4 * math.exp(-(2**2) / 72) * clipped])

    def test_references_are_averaged_and_words_are_lower_case(self) -> None:
        answers = [Answer("A b!", "", ("a b", "x y")), Answer("c", "", ("d",))]
        assert cider(answers) == pytest.approx((10 / 4 * 2 / 2 + 0) / 2)

    def test_is_coco_captions(self) -> None:
        scorer = pytest.importorskip("pycocoevalcap.cider.cider_scorer").CiderScorer()
        draw = random.Random(0)

        def text() -> str:
            return " ".join(draw.choices("abcdefgh", k=draw.randint(1, 12)))

        pairs = [(text(), [text() for _ in range(draw.randint(1, 4))]) for _ in range(30)]
        for candidate, references in pairs:
            scorer += (candidate, references)
        _, theirs = scorer.compute_score()
        ours = cider_scores([(c.split(), [r.split() for r in refs]) for c, refs in pairs])
        assert ours == pytest.approx(list(theirs))


def test_overlap_by_hand() -> None:
    for package in ("sacrebleu", "nltk", "rouge_score"):
        pytest.importorskip(package)
    one = [Answer("The cat sat on the mat", "", ("the cat sat on a mat",))]
    assert score(["bleu"], one)["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert score(["rouge_l"], one)["rouge_l"] == pytest.approx(5 / 6)
    # -log2(1/4) for each of four words; what follows a word is certain.
    assert score(["nist"], [Answer("A b c d", "", ("a b c d",))])["nist"] == pytest.approx(2)
    several = [Answer("a b c d e", "", ("x", "a b c d e")), Answer("f g h i j", "", ("f g h i j",))]
    assert score(["bleu", "rouge_l"], several)["bleu"] == pytest.approx(100)
    assert score(["rouge_l"], several)["rouge_l"] == 1
    # A short answer to the first is as short with or without a second reference of the other.
    one, two = (Answer("a b c d e", "", ("a b c d e f g h i j",)), Answer("k l m n o", "", ("k l m n o", "k l m n o")))
    alone = score(["bleu"], [one, Answer(two.text, "", two.references[:1])])["bleu"]
    assert score(["bleu"], [one, two])["bleu"] == pytest.approx(alone) and alone < 80
    assert score(["nist"], [Answer("", "", ("a",))])["nist"] == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = GenerationMetric("peftlab.tasks.generated:bleu", packages=("no_such_package",))
    monkeypatch.setitem(GENERATION_METRICS._rows, "bleu", row)
    with pytest.raises(PeftlabError, match=r"bleu needs no_such_package: pip install 'peftlab\[metrics\]'"):
        check_packages(["exact_match", "bleu"])


class TestContexts:
    def test_rows_with_one_prompt_are_one_context(self) -> None:
        rows = [Completion(p, c, "f:1") for p, c in (("ab", " x"), ("cd", " y"), ("ab", " z"))]
        tokenizer, how = letters(), Encoding(16)
        contexts = make_contexts(rows, tokenizer, how, 0, None)
        assert [(c.prompt, c.references) for c in contexts.items] == [("ab", ("x", "z")), ("cd", ("y",))]
        assert contexts.ends == {tokenizer.eos_token_id}
        for context, row in zip(contexts.items, rows, strict=False):  # the prompt is the beginning of the training text
            tokens = encode(row, tokenizer, how)[0]
            assert list(context.ids) == tokens.input_ids[: tokens.trained.index(True)]
        assert len(make_contexts(rows, tokenizer, how, 0, 1).items) == 1

    def test_of_a_chat_the_last_answer_is_the_reference(self) -> None:
        turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
        row = Conversation([{"role": role, "content": text} for role, text in turns], "f:1")
        tokenizer = letters()
        contexts = make_contexts([row], tokenizer, Encoding(200), 0, None)
        (context,) = contexts.items
        assert context.prompt == "[user]a<end>\n[assistant]b<end>\n[user]c<end>\n[assistant]"
        assert context.references == ("d",)
        assert contexts.ends == {tokenizer.convert_tokens_to_ids("<end>")}

    def test_long_prompts_are_counted(self) -> None:
        rows = [Completion("a" * n, " x", "f:1") for n in (3, 30)]
        contexts = make_contexts(rows, letters(), Encoding(16), 0, None)
        assert (len(contexts.items), contexts.too_long) == (1, 1)
        with pytest.raises(PeftlabError, match=r"every held-out prompt is longer than train.max_length, 2 tokens"):
            make_contexts(rows, letters(), Encoding(2), 0, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metrics": ["blue"]}, "unknown metric 'blue' .did you mean 'bleu'"),
        ({"metrics": []}, "at least 1 item"),
        ({"metrics": ["bleu"], "top_p": 0.9}, "set temperature above 0"),
        ({"metrics": ["bleu"], "beams": 4, "temperature": 1}, "beam search does not sample"),
        ({"metrics": ["bleu"], "length_penalty": 0.8}, "set beams above 1"),
    ],
)
def test_mistakes(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerateConfig.model_validate(values)
