"""Each kind of draft from recipe to export on a real, small model: a resumed run, trees in batches, an update."""

from __future__ import annotations

import json
import shutil
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.policies import Goodput
from peftlab.decoding.table import policy
from peftlab.drafting.base import load_pair, make_drafter
from peftlab.drafting.config import DflashDraft, Markov
from peftlab.drafting.export import export_draft
from peftlab.drafting.table import find_draft
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import draft_lengths, plan_draft
from peftlab.pipelines.draft import run_draft
from peftlab.pipelines.recipes import run_recipe
from peftlab.pipelines.update import update_draft, update_live
from peftlab.recipe.load import load_recipe

SMALL = ["data.samples=1", "data.held_out=1", "data.max_new_tokens=8"]
SMALL += ["train.max_length=48", "train.max_steps=4", "train.eval_every=2"]
KINDS = {
    "medusa": ("{kind: medusa, heads: 2, bias: true, markov: 4, vocabulary: 300}", "null", "heads/model.safetensors"),
    "hydra": ("{kind: hydra, heads: 2, shared_head: true, vocabulary: 300}", "null", "heads/model.safetensors"),
    "mtp": ("{kind: mtp, steps: 2, vocabulary: 300, store_gb: 1}", "null", "mtp/model.safetensors"),
    "dflash": (
        "{kind: dflash, block_size: 5, layers: 2, vocabulary: 300, store_gb: 1, anchors: 6}",
        "null",
        "dflash/model.safetensors",
    ),
    "dspark": (
        "{kind: dflash, block_size: 4, markov: {rank: 6, head: gated}, confidence: true, vocabulary: 300, anchors: 6}",
        "null",
        "dflash/model.safetensors",
    ),
    "pard": ("{kind: pard, tokens: 4, vocabulary: 300}", "{name: lora, r: 4}", "merged/model.safetensors"),
    "gated_lora": ("{kind: gated_lora, noise: true}", "{name: lora, r: 4}", "adapter/adapter_model.safetensors"),
}
REFUSED = {
    "medusa": ("vllm", "Medusa heads, which no released engine loads"),
    "hydra": ("vllm", "Hydra heads, which no released engine loads"),
    "mtp": ("vllm", "only for targets that come with them"),
    "dflash": ("transformers", "is a dflash draft, which is written for vllm, sglang"),
    "dspark": ("transformers", "is a dflash draft, which is written for vllm, sglang"),
    "pard": ("sglang", "which vllm alone drafts with"),
    "gated_lora": ("vllm", "which sglang alone serves"),
}


def recipe(stories: Path, out: Path, kind: str, *overrides: str) -> Any:
    draft, method, _ = KINDS[kind]
    wanted = [f"target={stories}", f"draft={draft}", f"method={method}", *SMALL, f"output_dir={out}", *overrides]
    return load_recipe("draft/ci", wanted)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are, and beside them the target's text."""
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, stories: Path, place: Path) -> tuple[str, Path]:
    run_recipe(recipe(stories, place / request.param, request.param))
    return request.param, place / request.param


def test_a_run_resumes_to_the_same_bytes_and_decodes_exactly(run: tuple[str, Path], stories: Path) -> None:
    kind, place = run
    results = json.loads((place / "results.json").read_text())
    assert results["draft"] == kind.replace("dspark", "dflash") and results["decoding"]["after"]["lossless"] is True
    assert 0 < results["metrics"]["prompts"]["acceptance"] <= 1
    assert ("confidence" in results) == (kind == "dspark")
    weights, metrics = load_file(place / KINDS[kind][2]), (place / "metrics.jsonl").read_bytes()
    sorted((place / "checkpoints").glob("step-*.pt"))[-1].unlink()
    (place / "results.json").unlink()
    run_draft(recipe(stories, place, kind), resume=True)
    again = load_file(place / KINDS[kind][2])
    assert again.keys() == weights.keys() and all(tensor.equal(again[name]) for name, tensor in weights.items())
    assert (place / "metrics.jsonl").read_bytes() == metrics


def test_chains_follow_goodput(run: tuple[str, Path], stories: Path) -> None:
    _, place = run
    pair, tokenizer = load_pair(str(stories), str(place)), AutoTokenizer.from_pretrained(stories)
    prompts = [tokenizer(text)["input_ids"] for text in ("A", "The moon was", "Sam ran to the big")]
    plain = [output.tokens for output in decode(pair.target, prompts, StoppingCriteria(20))]
    drafters = {"draft": partial(make_drafter, "draft", pair, 1)}
    lengths = draft_lengths(policy("goodput"), 2, pair.target, drafters, batch=3)
    shared = lengths.policies["draft"]()
    assert isinstance(shared, Goodput) and [*shared.times.drafts] == [1, 2, 3]
    assert all([*times] == [1, 2] and min(times.values()) > 0 for times in shared.times.drafts.values())
    outputs = decode(pair.target, prompts, StoppingCriteria(20), drafters["draft"](), policy=lengths.policies["draft"])
    assert [output.tokens for output in outputs] == plain


@pytest.mark.parametrize("kind", ["mtp", "dflash", "pard", "gated_lora"])
def test_a_recipe_measures_its_draft_by_goodput(kind: str, stories: Path, tmp_path: Path) -> None:
    run_recipe(recipe(stories, tmp_path / "out", kind, "policy=goodput", "train.max_steps=2"))
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (
        results["decoding"]["after"]["lossless"] is True
        and "policy: goodput" in (tmp_path / "out" / "recipe.yaml").read_text()
    )


def test_chains_and_trees_in_batches_are_the_targets_own(run: tuple[str, Path], stories: Path) -> None:
    kind, place = run
    assert find_draft(str(place))[0].config.endswith(
        f".config:{kind.title().replace('_', '').replace('Dspark', 'Dflash')}Draft"
    )
    pair, tokenizer = load_pair(str(stories), str(place)), AutoTokenizer.from_pretrained(stories)
    prompts = [tokenizer(text)["input_ids"] for text in ("A", "The moon was", "Sam ran to the big")]
    plain = [output.tokens for output in decode(pair.target, prompts, StoppingCriteria(20))]
    names = ["draft", *(["one_pass"] if kind == "gated_lora" else [])]
    for name, (width, gamma) in product(names, ((1, 2), (1, 5), (3, 6))):
        drafter = make_drafter(name, pair, width)
        outputs = decode(pair.target, prompts, StoppingCriteria(20), drafter, policy=lambda n=gamma: Fixed(n))
        assert [output.tokens for output in outputs] == plain, (name, width, gamma)
        assert any(step.drafted for output in outputs for step in output.steps)


def test_an_update_continues_and_an_export_says_what_loads_it(
    run: tuple[str, Path], stories: Path, tmp_path: Path
) -> None:
    kind, place = run
    rows = [{"prompt_ids": [1, 403 + i], "response_ids": [410, 411, 412 + i, 420]} for i in range(5)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = json.loads((place / "results.json").read_text())["last_metrics"]["prompts"]["acceptance"]
    updated = update_draft(place, tmp_path / "log.jsonl", overrides=("train.max_steps=2",))
    assert updated.baseline_metrics["prompts"]["acceptance"] == pytest.approx(
        before, abs=0.02
    )  # tokens of the log may be drafted, too
    assert find_draft(str(place / "updates" / "0001"))[0] is find_draft(str(place))[0]
    consumer, words = REFUSED[kind]
    with pytest.raises(PeftlabError, match=words):
        export_draft(place, tmp_path / "out", consumer, str(stories))
    assert not (tmp_path / "out").exists()


def test_a_stream_is_answered_as_by_the_target_while_the_draft_learns(
    run: tuple[str, Path], stories: Path, tmp_path: Path
) -> None:
    kind, place = run
    place = shutil.copytree(place, tmp_path / "run")
    rows = [{"prompt_ids": [1, 403 + i]} for i in range(4)]
    (tmp_path / "stream.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "gated_lora":
        before = sorted(place.rglob("*"))
        with pytest.raises(PeftlabError, match="trains within the target, which decodes meanwhile"):
            update_live(place, tmp_path / "stream.jsonl", every=2)
        assert sorted(place.rglob("*")) == before
        return
    found = update_live(place, tmp_path / "stream.jsonl", every=2)
    assert (found.updates, found.unequal, found.windows[0].live) == (2, 0, found.windows[0].frozen)
    first, last = (load_file(each / KINDS[kind][2]) for each in (place, Path(found.draft)))
    assert any(tensor.shape != last[name].shape or not tensor.equal(last[name]) for name, tensor in first.items())
    assert find_draft(found.draft)[0] is find_draft(str(place))[0]
    answers = json.loads((Path(found.draft) / "windows" / "0002.json").read_text())["requests"]
    pair, prompts = load_pair(str(stories)), [row["prompt_ids"] for row in rows[2:]]
    plain = decode(pair.target, prompts, StoppingCriteria(8, pair.eos))
    assert [answer["response_ids"] for answer in answers] == [output.tokens for output in plain]


@pytest.mark.parametrize(
    "sections",
    [
        *(
            pytest.param(f"draft={draft} method={method}", marks=() if kind == "dspark" else pytest.mark.long)
            for kind, (draft, method, _) in KINDS.items()
        ),
        "draft={kind: eagle3, features: [1, 3, 4], vocabulary: 300} method=null",
        "draft={kind: early_exit, exits: [2]} method={name: lora, r: 4}",
        "draft={kind: model, truncate: {layers: [0, 4]}} method={name: lora, r: 4}",
    ],
)
def test_a_target_in_16_bits_and_mixed_precision(stories: Path, place: Path, tmp_path: Path, sections: str) -> None:
    """``accelerate`` gives what a model returns in fp32, and the LM head stays as it is stored."""
    draft, method = sections.split(" method=")
    half = ["base.dtype=bf16", "train.precision=bf16", "train.max_steps=2"]
    half += [f"data.cache={place / 'draft-data'}", f"output_dir={tmp_path / 'run'}"]
    overrides = [f"target={stories}", draft, f"method={method}", *SMALL, *half]
    results = run_recipe(load_recipe("draft/ci", overrides))
    assert 0 < results.metrics["prompts"]["acceptance"] <= 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_draft_writes_its_own_text_in_mixed_precision(stories: Path, tmp_path: Path, dtype: str) -> None:
    half = [
        f"base.dtype={dtype}",
        "train.precision=bf16",
        "train.max_steps=2",
        f"output_dir={tmp_path / 'run'}",
    ]
    draft = ["draft={kind: model, truncate: {layers: [0, 4]}}", "method={name: lora, r: 4}", "data.on_policy=1"]
    overrides = [f"target={stories}", *draft, *SMALL, *half]
    results = run_recipe(load_recipe("draft/ci", overrides))
    assert 0 < results.metrics["prompts"]["acceptance"] <= 1


@pytest.mark.parametrize("run", ["medusa"], indirect=True)
def test_heads_of_other_settings_are_not_continued_from(run: tuple[str, Path], stories: Path, tmp_path: Path) -> None:
    kind, place = run
    one, many = "a Markov bias of rank 4 (draft.markov)", "2 heads with 2 LM heads (draft.heads, draft.shared_head)"
    for settings, wanted in (
        ("heads: 2, bias: true", f"{many}, biases (draft.bias)"),
        ("heads: 2, markov: 4", f"{many}, {one}"),
        ("heads: 2, bias: true, markov: 3", "a Markov bias of rank 3 (draft.markov)"),
    ):
        draft = f"draft={{kind: medusa, from: {place}, {settings}}}"
        with pytest.raises(PeftlabError) as caught:
            run_recipe(recipe(stories, tmp_path / "out", kind, draft))
        assert f"draft.from: {place} has {many}, biases (draft.bias), {one}; the recipe asks for" in str(caught.value)
        assert str(caught.value).endswith(wanted) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("run", ["dspark"], indirect=True)
def test_a_confidence_head_ends_drafts(run: tuple[str, Path], stories: Path, tmp_path: Path) -> None:
    _, place = run
    pair, tokenizer = load_pair(str(stories), str(place)), AutoTokenizer.from_pretrained(stories)
    prompts = [tokenizer(text)["input_ids"] for text in ("A", "The moon was", "Sam ran to the big")]
    drafters = {"draft": partial(make_drafter, "draft", pair)}
    plain, drafted = [output.tokens for output in decode(pair.target, prompts, StoppingCriteria(20))], {}
    for name in ("fixed", "head:0.5", "head:0.9"):
        lengths = draft_lengths(policy(name), 4, pair.target, drafters)
        outputs = decode(
            pair.target, prompts, StoppingCriteria(20), drafters["draft"](), policy=lengths.policies["draft"]
        )
        assert [output.tokens for output in outputs] == plain
        drafted[name] = [step.drafted for output in outputs for step in output.steps]
    assert max(drafted["fixed"]) == 4 and sum(drafted["head:0.5"]) <= sum(drafted["head:0.9"])
    assert sum(drafted["head:0.5"]) / len(drafted["head:0.5"]) < sum(drafted["fixed"]) / len(drafted["fixed"])
    with pytest.raises(PeftlabError, match="gamma 5: the draft was trained to draft 4 tokens in a pass; give 4"):
        draft_lengths(policy("fixed"), 5, pair.target, drafters)
    with pytest.raises(PeftlabError, match="gamma 6: the draft was trained to draft 4 tokens"):
        draft_lengths(policy("fixed:6"), 4, pair.target, drafters)
    other = "draft={kind: dflash, markov: 4, from: " + str(place) + "}"
    with pytest.raises(PeftlabError, match="was trained with rank 6, gated; leave it out"):
        run_recipe(recipe(stories, tmp_path / "out", "dspark", other))


@pytest.mark.parametrize("run", ["pard"], indirect=True)
def test_vllm_drafts_with_masks(run: tuple[str, Path], stories: Path, tmp_path: Path) -> None:
    _, place = run
    exported = export_draft(place, tmp_path / "out", "vllm", str(stories), gamma=3)
    assert '"num_speculative_tokens": 3, "parallel_drafting": true' in exported.command
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["spd_type"], config["pard_length"], config["vocab_size"]) == ("pard", 4, 512)
    assert 0 <= config["pard_token"] < 512
    with pytest.raises(PeftlabError, match="trained to write 4 tokens"):
        export_draft(place, tmp_path / "other", "vllm", str(stories), gamma=5)
    with pytest.raises(PeftlabError, match="no step for each token to plan"):
        plan_draft(str(stories), str(place))


@pytest.mark.parametrize("run", ["gated_lora"], indirect=True)
def test_sglang_serves_a_gated_lora_and_nothing_takes_it_for_an_adapter(
    run: tuple[str, Path], stories: Path, tmp_path: Path
) -> None:
    _, place = run
    assert json.loads((place / "results.json").read_text())["method"] == "lora" and not (place / "merged").exists()
    exported = export_draft(place, tmp_path / "out", "sglang", str(stories), gamma=4)
    assert "--speculative-algorithm UNO --uno-lora-path" in exported.command and exported.max_logit_difference == 0
    assert exported.command.endswith("--speculative-num-draft-tokens 4")
    written, mine = (load_file(d / "adapter_model.safetensors") for d in (tmp_path / "out", place / "adapter"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in written
    assert written.keys() == mine.keys() and all(tensor.equal(mine[name]) for name, tensor in written.items())
    with pytest.raises(PeftlabError, match="trained to write 4 tokens"):
        export_draft(place, tmp_path / "other", "sglang", str(stories), gamma=5)
    for reference in (place, place / "adapter"):
        with pytest.raises(PeftlabError, match="a gated LoRA, which acts on a draft's masks alone"):
            load_pair(str(reference))
        with pytest.raises(PeftlabError, match="a gated LoRA, which acts on a draft's masks alone"):
            merge_checkpoint(reference, None, tmp_path / "merged")
    pair = load_pair(str(stories), str(place))
    assert pair.masks is not None
    with pytest.raises(PeftlabError, match="drafter one_pass: of a gated_lora draft"):
        make_drafter("one_pass", load_pair(str(stories)))


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("medusa", ["draft={kind: medusa, from: nowhere}"], "nowhere contains no Medusa heads"),
        ("hydra", ["draft={kind: hydra, from: nowhere}"], "nowhere contains no Hydra heads"),
        ("hydra", ["policy=confidence:0.5"], "heads draft trees"),
        ("mtp", ["draft={kind: mtp, from: nowhere}"], "nowhere is no mtp draft"),
        ("mtp", ["method={name: lora}"], "a new mtp layer trains whole"),
        ("gated_lora", ["draft={kind: gated_lora, mask_token: 512}"], "512 is no token; the target has 0 to 511"),
        ("gated_lora", ["draft={kind: gated_lora, blocks: [4, 2]}"], "[4, 2] is not a rising list"),
        ("gated_lora", ["draft={kind: gated_lora, noise: true, mask_token: 3}"], "remove one of them"),
        ("gated_lora", ["draft={kind: gated_lora, from: nowhere}"], "nowhere is no gated LoRA"),
        ("gated_lora", ["method={name: houlsby}"], "houlsby: gated_lora trains by lora"),
        ("gated_lora", ["method=null"], "has no parameters of its own to train"),
        ("gated_lora", ["method={name: lora, target_modules: [embed_tokens]}"], "model.embed_tokens (Embedding)"),
        ("gated_lora", ["merge=true"], "there is nothing to merge"),
        ("gated_lora", ["policy=confidence:0.5"], "masks predict all at once"),
        ("gated_lora", ["draft_window='4:16'"], "gated_lora drafts in the target's"),
        ("gated_lora", ["objective.name=topk_kl", "data.top_k=4"], "gated_lora trains without topk_kl"),
        ("dflash", ["draft={kind: dflash, features: [3, 2]}"], "from 0, rising, such as [2, 3]"),
        ("dflash", ["draft={kind: dflash, markov: 0}"], "draft.markov: must be a rank from 1, such as 64"),
        (
            "dflash",
            ["draft={kind: dflash, markov: {rank: 4, head: gate}}"],
            "vanilla, gated or rnn, got 'gate' (did you",
        ),
        ("dflash", ["draft={kind: dflash, markov: true}"], "draft.markov: must be a rank from 1, such as 64"),
        ("dspark", ["gamma=5"], "gamma: 5, but a block drafts 4 tokens; write draft.block_size: 5"),
        ("dflash", ["draft={kind: dflash, features: [1, 6]}"], "no layer 6; the target has 0 to 4, and 5 is the state"),
        ("dflash", ["draft={kind: dflash, mask_token: 512}"], "512 is no token of the target; leave it out"),
        ("dflash", ["draft={kind: dflash, mask_token: 300}"], "300 is text to the tokenizer; leave it out"),
        ("dflash", ["draft={kind: dflash, confidence: true}"], "give markov a rank, such as 64"),
        ("dflash", ["draft={kind: dflash, block_size: 3}", "gamma=3"], "drafts 2 tokens; write draft.block_size: 4"),
        ("dflash", ["policy=head"], "head: reads a trained head"),
        ("dflash", ["draft={kind: dflash, from: nowhere}"], "nowhere is no dflash draft"),
        ("dflash", ["method={name: lora}"], "a new dflash layer trains whole"),
        ("pard", ["draft={kind: pard, mask_token: 512}"], "512 is no token; the target has 0 to 511"),
        ("pard", ["draft={kind: pard, from: a, truncate: {layers: [0]}}"], "needs exactly one of from: REF"),
        ("pard", ["policy=confidence:0.5"], "pard writes all at once"),
        ("pard", ["gamma=5"], "gamma: 5, but a pass writes 4 tokens; write draft.tokens: 5"),
        ("pard", ["merge=false"], "remove merge: false"),
        ("pard", ["method={name: houlsby}"], "the method has no linear fold"),
        ("pard", ["objective.name=topk_kl", "data.top_k=4"], "pard trains without topk_kl"),
    ],
)
def test_mistakes_in_a_recipe(stories: Path, tmp_path: Path, kind: str, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError) as caught:
        run_recipe(recipe(stories, tmp_path / "out", kind, *overrides))
    assert message in str(caught.value) and not (tmp_path / "out").exists()


def test_a_rank_alone_is_a_vanilla_markov_head() -> None:
    drafts = [
        load_recipe("draft/quickstart", [f"draft={{kind: dflash, markov: {markov}, confidence: true}}"]).draft
        for markov in ("64", "{rank: 64}", "{rank: 64, head: vanilla}")
    ]
    assert drafts[0] == drafts[1] == drafts[2]
    assert isinstance(drafts[0], DflashDraft) and drafts[0].drafted == drafts[0].block_size == 8
    assert drafts[0].markov == Markov(rank=64, head="vanilla")
