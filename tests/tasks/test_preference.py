"""Preference data: how pairs are read and tokenised, and that the loss is the published one."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from test_language import TURNS
from test_language import tokenizer as tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import peftlab
from peftlab.errors import PeftlabError
from peftlab.methods.config import FullConfig
from peftlab.methods.inject import trainable_parameters
from peftlab.tasks import language as likelihood
from peftlab.tasks.conversations import Completion, Conversation
from peftlab.tasks.language_examples import Encoding
from peftlab.tasks.preference import (
    SIDES,
    Preference,
    PreferenceEvaluation,
    answer_log_probs,
    collate_pairs,
    encode_preference,
    encode_preferences,
    load_preferences,
    preference_loss,
)
from peftlab.tasks.table import DataConfig, find_task

BETA = 0.3
HOW = Encoding(64, train_on="last")
PAIRS = [("ab", "yes", "no, not at all"), ("What?", "a longer answer", "x"), ("Who?", "me", "you"), ("?", "1", "22")]
ROWS = [Preference(Completion(p, c, "x"), Completion(p, r, "x"), "x") for p, c, r in PAIRS]


@pytest.fixture
def data(tokenizer):
    return encode_preferences(ROWS, tokenizer, HOW)[0]


def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=110, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            initializer_range=0.3,
        )
    )  # fmt: skip


def moved(policy: torch.nn.Module) -> torch.nn.Module:
    """Change what is trained, so that policy and reference differ."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


def evaluation(data) -> PreferenceEvaluation:
    return PreferenceEvaluation({"validation": data}, 0, 3, BETA)


def plain_log_probs(policy, inputs) -> torch.Tensor:
    """Log-probabilities of the answers, from all the logits there are."""
    logits = policy(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    found = logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
    return (found * inputs["trained"][:, 1:]).sum(1)


METHODS = [
    peftlab.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5),
    peftlab.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], lora_dropout=0.0),
    FullConfig(),
]


class TestLoss:
    @pytest.mark.parametrize("method", METHODS)
    def test_log_two_before_the_first_step(self, data, method) -> None:
        policy = peftlab.inject(model(), method).train()
        scorer = evaluation(data)
        referred = scorer.refer(policy, data)
        assert policy.training, "the reference is computed in eval mode, and training goes on"
        loss = preference_loss(policy, collate_pairs(list(referred), pad=0), beta=BETA)
        assert loss.item() / len(data) == pytest.approx(math.log(2), abs=1e-6)  # dropout before B = 0 adds nothing
        scores = evaluation(referred).score(policy.eval())["validation"]
        assert scores == {
            "loss": pytest.approx(math.log(2), abs=1e-12), "reward_accuracy": 0, "reward_margin": 0,
            "chosen_reward": 0, "rejected_reward": 0,
        }  # fmt: skip

    @pytest.mark.parametrize("method", METHODS[1:])
    def test_a_frozen_reference_beside_the_policy_gives_the_same(self, data, method, monkeypatch) -> None:
        monkeypatch.setattr(likelihood, "_CHUNK", 5)  # the answers of this batch are several chunks
        reference = model().eval()
        policy = peftlab.inject(model(), method)
        inputs = collate_pairs(list(evaluation(data).refer(policy, data)), pad=0)
        moved(policy)
        with torch.no_grad():
            rho = plain_log_probs(reference, inputs)
        rewards = BETA * (plain_log_probs(policy, inputs) - rho)
        z = rewards[: len(data)] - rewards[len(data) :]
        parameters = trainable_parameters(policy)
        expected = -torch.log(torch.sigmoid(z)).sum()
        gradients = torch.autograd.grad(expected, list(parameters.values()))
        loss = preference_loss(policy, inputs, beta=BETA)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        for name, one, other in zip(
            parameters, torch.autograd.grad(loss, list(parameters.values())), gradients, strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)
        assert any(bool(g.abs().max() > 1e-3) for g in gradients)

    def test_the_sum_over_an_answer_and_not_its_mean(self, data) -> None:
        policy = model().eval()
        inputs = collate_pairs(list(data), pad=0)
        torch.testing.assert_close(answer_log_probs(policy, inputs), plain_log_probs(policy, inputs))
        counts = inputs["trained"].sum(1)
        assert len(set(counts.tolist())) > 4, "answers of several lengths, or a mean would be the sum's multiple"

    def test_swapping_the_answers_flips_z(self, data) -> None:
        policy = peftlab.inject(model(), METHODS[1]).eval()
        referred = evaluation(data).refer(policy, data)
        moved(policy)
        names = {"chosen": "rejected", "rejected": "chosen"}
        swapped = data.rename_columns(
            {f"{a}_{k}": f"new_{b}_{k}" for a, b in names.items() for k in ("ids", "trained")}
        )
        swapped = swapped.rename_columns({c: c.removeprefix("new_") for c in swapped.column_names if c != "length"})
        swapped = swapped.add_column("reference", [pair[::-1] for pair in referred["reference"]])
        one, other = (evaluation(rows).score(policy)["validation"] for rows in (referred, swapped))
        assert other["reward_margin"] == pytest.approx(-one["reward_margin"], rel=1e-4) and one["reward_margin"] != 0
        assert other["reward_accuracy"] == 1 - one["reward_accuracy"]
        assert other["chosen_reward"] == pytest.approx(one["rejected_reward"], rel=1e-4)

    def test_trl_gives_the_same(self, data, tokenizer, tmp_path) -> None:
        """TRL's own trainer on the same tokens, with a second model as its reference."""
        trl = pytest.importorskip("trl", reason="TRL is not installed")
        from datasets import Dataset

        rows = []
        for row in data:
            first = row["chosen_trained"].index(True)
            answers = {s: [i for i, t in zip(row[f"{s}_ids"], row[f"{s}_trained"], strict=True) if t] for s in SIDES}
            rows.append({"prompt_ids": row["chosen_ids"][:first], **{f"{s}_ids": ids for s, ids in answers.items()}})
        policy = peftlab.inject(model(), FullConfig())
        inputs = collate_pairs(list(evaluation(data).refer(policy, data)), pad=0)
        moved(policy)
        settings = trl.DPOConfig(
            output_dir=str(tmp_path), beta=BETA, report_to=[], use_cpu=True, bf16=False, max_length=None,
            gradient_checkpointing=False, disable_dropout=False,
        )  # fmt: skip
        theirs = model()
        theirs.load_state_dict(policy.state_dict())
        text = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
        trainer = trl.DPOTrainer(
            model=theirs, ref_model=model(), args=settings, train_dataset=Dataset.from_list(text),
            processing_class=copy.deepcopy(tokenizer),
        )  # fmt: skip
        loss = trainer.compute_loss(trainer.model.train(), trainer.data_collator(rows))
        ours = preference_loss(policy.train(), inputs, beta=BETA) / len(data)
        assert float(ours) == pytest.approx(float(loss), rel=1e-5)
        loss.backward()
        ours.backward()
        for (name, one), other in zip(policy.named_parameters(), trainer.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


ASKED = TURNS[:4]
BETTER, WORSE = TURNS[4], {"role": "assistant", "content": "No idea"}
SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "One?"},
            {"from": "gpt", "value": " First answer "}, {"from": "human", "value": "Two?"}]  # fmt: skip
SHAPES = {
    "turns": {"prompt": ASKED, "chosen": [BETTER], "rejected": [WORSE]},
    "implicit prompt": {"chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]},
    "prompt repeated as text": {"prompt": "Two?", "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]},
    "prompt repeated as turns": {"prompt": ASKED[:2], "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]},
    "turns and texts": {"prompt": ASKED, "chosen": "Second", "rejected": "No idea"},
    "ShareGPT": {"conversations": SHAREGPT, "chosen": {"from": "gpt", "value": "Second"},
                 "rejected": {"from": "gpt", "value": "No idea"}},
    "system": {"system": "Be brief.", "prompt": ASKED[1:], "chosen": [BETTER], "rejected": [WORSE]},
}  # fmt: skip


class TestRows:
    def read(self, tmp_path: Path, rows: list[dict], **options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"validation": 1} | options
        return load_preferences(find_task("text/preference"), DataConfig(path=str(file), **options))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_every_shape_is_the_same_pair(self, tmp_path: Path, shape: str) -> None:
        _, splits, left_out = self.read(tmp_path, [SHAPES[shape]] * 3)
        assert [len(rows) for rows in splits.values()] == [2, 1] and not left_out
        row = splits["train"][0]
        assert (row.chosen.messages, row.rejected.messages) == ([*ASKED, BETTER], [*ASKED, WORSE])

    def test_texts_keep_their_system_turn(self, tmp_path: Path) -> None:
        row = {"system": "Be brief.", "prompt": "Hi", "chosen": "a", "rejected": "b"}
        _, splits, _ = self.read(tmp_path, [row] * 2)
        turns = splits["train"][0].chosen.messages
        assert [turn["role"] for turn in turns] == ["system", "user", "assistant"]

    def test_a_prompt_is_missing_only_where_the_answers_do_not_contain_it(self, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]
        other = [chat[0], {"role": "assistant", "content": "b"}]
        whole = {"prompt": None, "chosen": chat, "rejected": other}
        texts = {"prompt": None, "chosen": "a", "rejected": "b"}
        _, splits, left_out = self.read(tmp_path, [whole, whole, texts], drop_missing=True)
        assert sum(map(len, splits.values())) == 2 and sum(left_out.values()) == 1

    def test_texts_are_a_chat_where_there_is_a_template(self, tokenizer) -> None:
        def shown(tokens) -> list[str]:
            return ["".join(tokenizer.convert_ids_to_tokens([i for i, t in zip(x.input_ids, x.trained, strict=True)
                                                             if t == kept])) for x in tokens for kept in (0, 1)]  # fmt: skip

        pair = encode_preference(ROWS[0], tokenizer, HOW)
        asked = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
        assert shown(pair) == [f"{asked}\n", "yes<|im_end|>", f"{asked}\n", "no, not at all<|im_end|>"]
        plain = copy.deepcopy(tokenizer)
        plain.chat_template = None
        assert shown(encode_preference(ROWS[0], plain, HOW)) == ["ab", "yes</s>", "ab", "no, not at all</s>"]

    def test_the_last_answer_is_trained(self, tokenizer) -> None:
        row = Preference(Conversation([*ASKED, BETTER], "x"), Conversation([*ASKED, WORSE], "x"), "x")
        for tokens, answer in zip(
            encode_preference(row, tokenizer, Encoding(500, train_on="last")), ("Second", "No idea"), strict=True
        ):
            ids = [i for i, t in zip(tokens.input_ids, tokens.trained, strict=True) if t]
            assert "".join(tokenizer.convert_ids_to_tokens(ids)) == f"{answer}<|im_end|>"

    def test_a_row_with_a_side_that_is_too_long_is_dropped_and_counted(self, tokenizer) -> None:
        long = Preference(Completion("?", "a", "f:9"), Completion("?", "b" * 90, "f:9"), "f:9")
        found, counted = encode_preferences([*ROWS, long], tokenizer, HOW)
        assert len(found) == counted.rows == 4 and counted.left_out == {"longer than train.max_length": 1}
        with pytest.raises(PeftlabError, match=r"f:9: \d+ tokens, and train\.max_length is 64"):
            encode_preferences([*ROWS, long], tokenizer, Encoding(64, "error", "last"))
        asked = Preference(Completion("?" * 90, "a", "f:9"), Completion("?" * 90, "b", "f:9"), "f:9")
        for too_long in ("drop", "truncate"):
            assert len(encode_preferences([*ROWS, asked], tokenizer, Encoding(64, too_long, "last"))[0]) == 4
        with pytest.raises(PeftlabError, match="every example is longer"):
            encode_preferences([asked], tokenizer, HOW)

    def test_a_pairs_length_is_what_it_takes_in_a_batch(self, tokenizer) -> None:
        found, _ = encode_preferences(ROWS, tokenizer, HOW)
        for row in found:
            batch = collate_pairs([row], pad=0)
            assert batch["input_ids"].numel() == row["length"] >= row["tokens"] == int(batch["attention_mask"].sum())
        assert any(row["length"] > row["tokens"] for row in found)

    def test_rows_without_an_answer_are_dropped_where_that_is_wanted(self, tmp_path: Path) -> None:
        rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3 + [
            {"prompt": "a", "chosen": None, "rejected": "c"}
        ]
        _, splits, left_out = self.read(tmp_path, rows, drop_missing=True)
        assert sum(map(len, splits.values())) == 3 and list(left_out.values()) == [1]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"prompt": "a", "chosen": "b"}, "no column 'rejected'"),
            ({"chosen": "b", "rejected": "c"}, "rows.jsonl:1: no prompt, and chosen does not contain it"),
            ({"prompt": "", "chosen": "b", "rejected": "c"}, "no prompt, and chosen"),
            ({"chosen": [BETTER], "rejected": [WORSE]}, "no prompt, and chosen"),
            ({"prompt": "a", "chosen": " ", "rejected": "c"}, "no chosen answer"),
            ({"prompt": "a", "chosen": "b", "rejected": None}, "no rejected answer"),
            ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected is neither a text nor turns, but 3"),
            ({"chosen": ASKED, "rejected": [*ASKED, WORSE]}, "chosen does not end with an answer, but with a turn of user"),
            ({"chosen": [*ASKED, BETTER], "rejected": [*ASKED[1:], WORSE]}, "differ before their last answer"),
            ({"prompt": "Three?", "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]}, "prompt is not a part of it"),
            ({"prompt": [BETTER], "chosen": "b", "rejected": "c"}, "without a user turn before it"),
        ],
    )  # fmt: skip
    def test_bad_rows(self, tmp_path: Path, row: dict, message: str) -> None:
        with pytest.raises(PeftlabError, match=message):
            self.read(tmp_path, [row] * 2)

    def test_equal_answers(self, tokenizer) -> None:
        row = Preference(Completion("a", "b", "f:3"), Completion("a", "b", "f:3"), "f:3")
        with pytest.raises(PeftlabError, match="f:3: chosen and rejected are the same answer"):
            encode_preferences([row], tokenizer, HOW)
