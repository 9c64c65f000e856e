"""Merged models and drafts in transformers' own ``generate``: the same tokens, and the same acceptance as here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.drafting.export import export_draft
from peftlab.errors import PeftlabError
from tests.command_line import invoke
from tests.engines.models import ADAPTERS, NEW_TOKENS, assert_greedy, prompts

pytestmark = pytest.mark.engines
GAMMA, LONGEST = 3, 32


def generate(model: Any, ids: list[int], **options: object) -> list[int]:
    """Return transformers' greedy tokens after a prompt."""
    output = model.generate(torch.tensor([ids]), do_sample=False, **options)
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_model(
    name: str,
    target: Path,
    adapters: dict[str, Path],
    adapted: Callable[[str], Any],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Its tokens are those of peft's model; what no plain model can hold is refused."""
    try:
        merge_checkpoint(adapters[name], str(target), tmp_path / "merged")
    except PeftlabError as error:
        assert name == "lora_bias" and not (tmp_path / "merged").exists(), error
        reason = str(error).replace(f"{adapters[name]}: ", "").partition(";")[0]
        record_property("shows", ["transformers", f"merged model: {name}", f"refused: {reason}"])
        return
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for ids in prompts(target):
        assert_greedy(adapted(name), ids, generate(merged, ids, max_new_tokens=NEW_TOKENS))
    record_property("shows", ["transformers", f"merged model: {name}", "peft's tokens"])


@pytest.mark.parametrize("kind", ["model", "early_exit"])
def test_assisted_generation(
    kind: str,
    target: Path,
    texts: Path,
    draft: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """Outputs are the target's greedy ones; the share of drafted tokens that is accepted is within our interval."""
    run = draft(kind)
    decoded, drafter = (run / "merged", "exit:4") if kind == "early_exit" else (target, str(run))
    out, where = tmp_path / "bench.json", ["--target", decoded, "--draft", drafter]
    options = ["--prompts", texts / "held_out.txt", "--max-new-tokens", LONGEST, "--gamma", GAMMA, "--repeats", 1]
    assert invoke("draft", "bench", *where, *options, "--drafter", "lookup", "--json", out).exit_code == 0
    low, high = json.loads(out.read_text())["drafters"]["draft"]["accepted_share_interval"]

    drafted, accepted = [], []
    candidates, update = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy

    def counted_candidates(self: Any, input_ids: torch.Tensor, **kwargs: object) -> Any:
        found = candidates(self, input_ids, **kwargs)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    def counted_matches(self: Any, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        accepted.append(int(num_matches))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", counted_candidates)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", counted_matches)
    model = transformers.AutoModelForCausalLM.from_pretrained(decoded).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(decoded)
    assistant, how = model, {"assistant_early_exit": 4}
    if kind == "model":
        export_draft(run, tmp_path / "draft", "transformers", str(target))
        assistant = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
        how = {"assistant_model": assistant}
    assistant.generation_config.update(
        num_assistant_tokens=GAMMA, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    for line in (texts / "held_out.txt").read_text().splitlines():
        ids = tokenizer(line)["input_ids"]
        output = generate(model, ids, max_new_tokens=LONGEST, **how)
        assert_greedy(model, ids, output)
        assert len(output) == LONGEST or output[-1] == tokenizer.eos_token_id
    assert len(drafted) == len(accepted) and max(drafted) == GAMMA
    share = sum(accepted) / sum(drafted)
    assert low <= share <= high
    figure = f"{share:.2f} of the drafted tokens accepted, {low:.2f} to {high:.2f} in peftlab"
    record_property("shows", ["transformers", f"draft: {kind}", f"{figure}; the outputs are peftlab's"])
