"""peft's adapters, loaded, trained, saved and merged: some of each set with every run, all of them with the long ones.

peft's own cases are judged where ``PEFT_CASES`` names its tests/test_custom_models.py.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import peft
import pytest

from peftlab.methods.config import PEFT_REFUSED
from tests.peft_cases.__main__ import every, table
from tests.peft_cases.cases import Case
from tests.peft_cases.document import BEGIN, END, PAGE, by_name, rows
from tests.peft_cases.document import table as page_table
from tests.peft_cases.embeddings import embeddings
from tests.peft_cases.experts import experts
from tests.peft_cases.judge import judge
from tests.peft_cases.towers import towers
from tests.peft_cases.translate import GROUP, translated
from tests.peft_cases.variants import starts, variants

# A file of the same form as peft's, with other cases.
WRITTEN = """
from peft import LoraConfig, NotYetReleasedConfig
from .testing_common import PeftCommonTester

TEST_CASES = [
    ("one", "Small", LoraConfig, {"target_modules": ["first"]}),
    ("both", "Small", LoraConfig, {"target_modules": ["first", "second"], "use_dora": True, "r": 2}),
    ("another method", "Small", LoraConfig, {"target_modules": ["first"], "kasa_config": KasaConfig(), "r": 2}),
    ("not LoRA", "Small", NotYetReleasedConfig, {"target_modules": ["first"]}),
]

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 12)
        self.second = nn.Linear(12, 9)

    def forward(self, X):
        return self.second(self.first(X.float()).relu())

class MockTransformerWrapper:
    @classmethod
    def from_pretrained(cls, model_id, dtype=None):
        torch.manual_seed(0)
        return Small()

class TestThatIsNotRun(PeftCommonTester):
    pass
"""
CHOSEN = {
    "llama: plain", "gpt2: dora", "bert: modules_to_save", "roberta: bias all", "roberta: all-linear",
    "roberta: all-linear, without a task type", "llama: one target absent", "pissa", "Mixtral: as modules",
    "Qwen3Moe: experts and router", "GptOss: bare names", "tied, both, whole, resized", "tied, both, by LoRA, resized",
    "untied, lm_head, by LoRA, bf16", "LlavaForConditionalGeneration: rows of tokens, resized",
    "Gemma3ForConditionalGeneration: queries, dora, all biases", "WhisperForConditionalGeneration: queries, resized",
    "MT5ForConditionalGeneration: embedding whole, kept tied",
}  # fmt: skip
QUICK = [case for case in [*variants(), *starts(), *experts(), *embeddings(), *towers()] if case.name in CHOSEN]


def test_a_file_of_peft_s_form_is_translated(tmp_path: Path) -> None:
    (tmp_path / "test_custom_models.py").write_text(WRITTEN)
    verdicts = [judge(case) for case in translated(tmp_path / "test_custom_models.py")]
    assert [(v.case.name, v.end) for v in verdicts] == [
        ("one", "pass"),
        ("both", "pass"),
        ("another method", "other method"),
    ]
    assert set(verdicts[0].steps) == {"load", "train", "save", "merge"}
    assert table(verdicts).endswith(f"| {GROUP} | 3 | 2 | 0 | 0 | 0 | 1 | 0 | 100.0% |")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_some_of_each_set(case: Case) -> None:
    verdict = judge(case)
    assert verdict.end == "pass", verdict


def test_the_page_has_every_field_and_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [f.name for f in dataclasses.fields(peft.LoraConfig) if f"`{f.name}`" not in page]
    assert not missing
    assert not [key for key in PEFT_REFUSED if f"`{key}`" not in page.partition("## What is refused")[2]]
    generated = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in generated[2:]] == list(rows())
    assert not {name for names in rows().values() for name in names} - by_name().keys()


@pytest.mark.long
def test_the_page_is_what_is_measured() -> None:
    assert page_table().strip() == PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


@pytest.mark.long
def test_all_of_them() -> None:
    named = os.environ.get("PEFT_CASES")
    verdicts = [judge(case) for case in every(Path(named) if named else None)]
    print(table(verdicts))
    wrong = [(v.case.group, v.case.name, v.detail) for v in verdicts if v.end == "wrong"]
    assert not wrong, wrong


def test_a_module_of_several_names_that_peft_adapts_under_one() -> None:
    case = next(case for case in towers() if case.name == "MT5ForConditionalGeneration: embedding by LoRA, resized")
    verdict = judge(case)
    assert verdict.end == "refused" and "shared and not encoder.embed_tokens, decoder.embed_tokens" in verdict.detail
