"""Draft recipes from end to end on a real, small model: run, resume, update, export, and what is refused."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import peftlab
from peftlab.checkpoints.adapter import load_adapter
from peftlab.cli.app import app
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import acceptance_statistics
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.acceptance import load_acceptance_head
from peftlab.drafting.base import load_pair
from peftlab.errors import PeftlabError
from peftlab.models.load import load_base
from peftlab.pipelines.benchmark import DecodingOptions
from peftlab.pipelines.draft import DraftResults
from peftlab.pipelines.recipes import run_recipe
from peftlab.pipelines.update import update_draft, update_live
from peftlab.recipe.load import load_recipe
from peftlab.recipe.schema import DraftRecipe
from peftlab.remote import RemoteDirectory

SMALL = ["data.samples=4", "data.held_out=1", "data.max_new_tokens=12"]
SMALL += ["train.epochs=2", "train.max_length=64", "train.eval_every=4"]


def go(stories: Path, out: Path | str, *overrides: str, **options: Any) -> DraftResults:
    recipe = load_recipe("draft/ci", [f"target={stories}", *SMALL, f"output_dir={out}", *overrides])
    return run_recipe(recipe, **options)


def refused(stories: Path, out: Path, *overrides: str) -> str:
    with pytest.raises(PeftlabError) as caught:
        go(stories, out, *overrides)
    assert not out.exists(), "nothing was started"
    return str(caught.value)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def run(stories: Path, place: Path) -> Path:
    """The shipped recipe with half as many tokens."""
    half = ["data.max_new_tokens=24", f"output_dir={place / 'ci'}"]
    run_recipe(load_recipe("draft/ci", [f"target={stories}", *half]))
    return place / "ci"


@pytest.fixture(scope="module")
def heads(stories: Path, place: Path) -> Path:
    go(stories, place / "heads", "method=null", "draft={kind: medusa, heads: 2}")
    return place / "heads"


def results_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


class TestRun:
    """What a run promises."""

    def test_acceptance_rises_and_the_merged_directory_has_it(self, run: Path) -> None:
        results = results_of(run)
        assert results["score"] > results["baseline_score"] + 0.1
        merged = results["merged_metrics"]["prompts"]["acceptance"]
        assert merged == pytest.approx(results["score"], abs=1e-4)
        before, after = results["decoding"]["before"], results["decoding"]["after"]
        assert after["block_efficiency"] > before["block_efficiency"] >= 1
        assert results["kept_share"] == 1.0
        assert set(after["beside"]) == {"suffix", "suffix+draft"} and min(after["beside"].values()) > 0
        assert after["lossless"] is True
        assert 0 <= results["repetition"]["seen"] <= 1 and 0 <= results["repetition"]["repeated"] <= 1

    def test_the_merged_draft_is_a_plain_model_and_decoding_with_it_is_exact(self, run: Path, stories: Path) -> None:
        target = AutoModelForCausalLM.from_pretrained(stories).eval()
        draft = AutoModelForCausalLM.from_pretrained(run / "merged").eval()
        tokenizer = AutoTokenizer.from_pretrained(run / "merged")
        assert draft.config.num_hidden_layers == 2
        prompt = tokenizer("Once upon a time")["input_ids"]
        plain, drafted = (
            decode(build_engine(target), [prompt], StoppingCriteria(30), d)[0].tokens
            for d in (None, ModelDrafter(build_engine(draft)))
        )
        assert plain == drafted
        ids = torch.tensor([prompt])
        assisted = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=30, do_sample=False
        )
        assert assisted[0, len(prompt) :].tolist() == plain

    def test_the_resolved_recipe_runs_again_from_the_cache(self, run: Path, place: Path) -> None:
        before = sorted((place / "draft-data").glob("*/*"))
        stamps = [path.stat().st_mtime_ns for path in before]
        overrides = [f"output_dir={place / 'again'}", "train.max_steps=2", "train.eval_every=2"]
        run_recipe(load_recipe(run / "recipe.yaml", [*overrides, "data.max_train_examples=3"]))
        assert stamps == [path.stat().st_mtime_ns for path in before]
        whole, some = results_of(run), results_of(place / "again")
        assert whole["train_examples"] > some["train_examples"] == 3
        assert whole["held_out"]["text"] == some["held_out"]["text"]

    @pytest.mark.long
    def test_at_a_url_it_resumes_on_another_machine(
        self, stories: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed as its second checkpoint is uploaded; what it becomes is decoded with, from the URL."""
        url, short = "memory://drafts/run", ["train.max_steps=4", "train.eval_every=2"]

        class Killed(BaseException):
            """Nothing catches this."""

        def killed(remote: RemoteDirectory, file: Path, name: str) -> None:
            if name == "checkpoints/step-00000004.pt":
                raise Killed
            upload(remote, file, name)

        upload = RemoteDirectory.upload
        monkeypatch.setenv("PEFTLAB_CACHE", str(place / "one machine"))
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RemoteDirectory, "upload", killed)
            go(stories, url, *short)
        monkeypatch.setenv("PEFTLAB_CACHE", str(place / "another"))
        peftlab.resume(url)
        go(stories, place / "at a path", *short)
        content = RemoteDirectory(url).read("merged/model.safetensors")
        assert content == (place / "at a path" / "merged" / "model.safetensors").read_bytes()
        few = DecodingOptions(max_new_tokens=8)
        plain, drafted = (peftlab.generate(str(stories), "Once", each, few).text for each in (None, url))
        assert plain == drafted

    def test_resumed_equals_uninterrupted(self, stories: Path, place: Path) -> None:
        """Examples of the lowest acceptance are chosen before the checkpoint that is resumed."""
        options = ["data.on_policy=0.5", "objective.name=jsd", "train.save_every=1"]
        options += ["train.sample={keep: 0.5, by: lowest_acceptance, rounds: 2}"]
        go(stories, place / "whole", *options)
        shutil.copytree(place / "whole", place / "cut")
        checkpoints = sorted((place / "cut" / "checkpoints").glob("step-*.pt"))
        checkpoints[-1].unlink()
        (place / "cut" / "results.json").unlink()
        go(stories, place / "cut", *options, resume=True)
        cut, whole = ((place / name / "metrics.jsonl").read_bytes() for name in ("cut", "whole"))
        assert cut == whole
        cut, whole = (load_file(place / name / "merged" / "model.safetensors") for name in ("cut", "whole"))
        assert all(torch.equal(cut[key], whole[key]) for key in whole)
        results, found = results_of(place / "cut"), results_of(place / "cut")["selection"]
        kept = round(results["train_examples"] / 2)
        assert (found["rounds"], found["examples"]) == (2, kept) and found["scoring_flops"] > 0
        assert found["scored_examples"] == results["train_examples"] - kept // 2

    @pytest.mark.parametrize(
        "overrides",
        [
            ["method=full", "merge.verify=false"],
            ["method={name: houlsby, bottleneck: 8}", "objective.name=lk"],
            ["objective.name=topk_kl", "data.top_k=8"],
            ["draft={kind: early_exit, exits: [3]}"],
            ["draft={kind: medusa, heads: 1}", "method={name: lora, r: 2}"],
        ],
    )
    def test_other_ways(self, stories: Path, place: Path, overrides: list[str]) -> None:
        out = place / f"way-{abs(hash(tuple(overrides)))}"
        results = go(stories, out, *overrides, "train.lr=1e-3")
        assert results.score > results.baseline_score
        merged = (out / "merged" / "config.json").exists()
        assert merged == ("houlsby" not in overrides[0])
        assert (results.merge is not None) == (merged and "merge.verify=false" not in overrides)

    def test_a_draft_of_few_tokens(self, stories: Path, place: Path) -> None:
        out = place / "few"
        results = go(stories, out, "draft.vocabulary=96", "train.lr=1e-3")
        assert results.vocabulary["tokens"] == 96 and 0.5 < results.vocabulary["ceiling"] < 1
        assert load_base(str(out / "merged"), "AutoModelForCausalLM")[0].lm_head.out_features == 512
        pair = load_pair(str(stories), str(out / "merged"))
        assert pair.draft is not None and pair.draft.kind.endswith("96 of 512 tokens")
        prompts, ending = [[1, 403, 407], [1, 346]], StoppingCriteria(40, pair.eos)
        for sampling in (Sampling(), Sampling(temperature=0.8, seed=3)):
            drafted = decode(pair.target, prompts, ending, ModelDrafter(pair.draft), sampling=sampling)
            assert sum(step.accepted for output in drafted for step in output.steps) > 0
            if not sampling.temperature:
                plain = decode(pair.target, prompts, ending)
                assert [output.tokens for output in drafted] == [output.tokens for output in plain]

    def test_reduced_heads_and_the_acceptance_head(self, stories: Path, place: Path) -> None:
        results = go(stories, place / "reduced", "method=null", "draft={kind: medusa, heads: 1, vocabulary: 128}")
        assert results.vocabulary["tokens"] == 128 and 0.5 < results.vocabulary["ceiling"] < 1
        config = json.loads((place / "reduced" / "heads" / "config.json").read_text())
        assert config["truncated_vocab_size"] == 128
        results = go(stories, place / "acceptance-head", "acceptance_head=true", "policy=head:0.3")
        assert results.decoding.after.lossless and results.decoding.after.gain is None, "its lengths vary"
        assert set(results.acceptance_head) == {"brier", "brier_constant"}
        assert (
            float(
                load_acceptance_head(place / "acceptance-head" / "acceptance_head.safetensors")(
                    torch.zeros(64)
                ).detach()
            )
            > 0
        )

    def test_selective_training_reports_its_share(self, stories: Path, run: Path, place: Path) -> None:
        chosen = [f"objective.reference={run / 'merged'}", "objective.selective=0.25"]
        assert go(stories, place / "selective", *chosen).kept_share == pytest.approx(0.25, abs=0.02)


class TestModes:
    """Dropout, on by default in GPT-2, is off wherever something is decoded, scored or timed."""

    @pytest.fixture(scope="class")
    def gpt2(self, stories: Path, place: Path) -> Path:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=512, n_embd=32, n_layer=3, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2,
            resid_pdrop=0.4, embd_pdrop=0.4, attn_pdrop=0.4,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        with torch.no_grad():
            model.transformer.wte.weight.mul_(20)  # choices of a random model differ only by rounding otherwise
        model.save_pretrained(place / "gpt2")
        AutoTokenizer.from_pretrained(stories).save_pretrained(place / "gpt2")
        return place / "gpt2"

    @pytest.mark.parametrize(
        "overrides",
        [
            ["method=null", "draft={kind: medusa, heads: 2}"],
            ["method={name: lora, r: 2}", "draft={kind: medusa, heads: 2}", "merge=false"],
        ],
        ids=["heads", "trained trunk in memory"],
    )
    def test_the_report_decodes_without_dropout(self, gpt2: Path, place: Path, overrides: list[str]) -> None:
        out = place / f"modes-{len(overrides[0])}"
        results = go(gpt2, out, *overrides, "train.max_steps=4", "data.samples=2")
        after = results.decoding.after
        assert after.lossless is True, "plain and drafted greedy outputs are the same"
        if overrides[0] == "method=null":
            assert results.metrics["prompts"]["preserved"] == 1.0

    def test_a_draft_that_is_not_merged_drafts_without_dropout(self, gpt2: Path, place: Path) -> None:
        """Its block efficiency is that of the adapter on disk."""
        out = place / "unmerged"
        small = ["train.max_steps=4", "data.samples=2", "data.temperature=0.5"]
        results = go(gpt2, out, "draft={kind: model, truncate: {layers: [0, 1, 2]}}", "merge=false", *small)
        draft = load_adapter(load_base(str(out / "base"), "AutoModelForCausalLM")[0], out)
        recipe, pair = load_recipe(out / "recipe.yaml"), load_pair(str(gpt2))
        assert isinstance(recipe, DraftRecipe) and isinstance(recipe.data.prompts, list)
        policy = partial(Fixed, recipe.gamma)
        steps = []
        for prompt in recipe.data.prompts[-recipe.data.held_out :]:
            ids, drafter = pair.tokenizer(prompt)["input_ids"], ModelDrafter(build_engine(draft))
            steps += decode(pair.target, [ids], StoppingCriteria(12, pair.eos), drafter, policy=policy)
        after = results.decoding.after
        assert after.block_efficiency == acceptance_statistics(steps).tau > 2

    def test_the_reports_benchmark_is_draft_bench(self, heads: Path, stories: Path, tmp_path: Path) -> None:
        """The same engine, and the same number of steps for the same prompts."""
        after = results_of(heads)["decoding"]["after"]
        recipe = load_recipe(heads / "recipe.yaml")
        assert isinstance(recipe, DraftRecipe) and isinstance(recipe.data.prompts, list)
        (tmp_path / "p.txt").write_text("\n".join(recipe.data.prompts[-recipe.data.held_out :]) + "\n")
        arguments = ["--target", stories, "--draft", heads / "heads", "--prompts", tmp_path / "p.txt"]
        settings = ["--max-new-tokens", 12, "--gamma", recipe.gamma, "--repeats", 1, "--json", tmp_path / "bench.json"]
        done = CliRunner().invoke(app, ["draft", "bench", *map(str, [*arguments, *settings])])
        assert done.exit_code == 0, done.output
        found = json.loads((tmp_path / "bench.json").read_text())
        assert (after["kernel"], after["block_efficiency"]) == (found["kernel"], found["tau"])
        assert after["accepted"] == found["acceptance"] and after["lossless"] == found["lossless"]


class TestUpdate:
    """Going on with served requests."""

    def test_an_update_learns_from_the_log_and_starts_at_the_newest_draft(
        self, run: Path, stories: Path, tmp_path: Path
    ) -> None:
        target = AutoModelForCausalLM.from_pretrained(stories).eval()
        tokenizer = AutoTokenizer.from_pretrained(stories)
        prompts = [tokenizer(text)["input_ids"] for text in ("A frog", "The moon", "Sam ran", "Her hat", "Big red bus")]
        served = decode(build_engine(target), prompts * 2, StoppingCriteria(24))
        rows = [{"prompt_ids": p, "response_ids": g.tokens} for p, g in zip(prompts * 2, served, strict=True)]
        log = tmp_path / "log.jsonl"
        log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        few = ("train.max_steps=4", "train.eval_every=4")
        run = shutil.copytree(run, tmp_path / "a #1 \U0001f600")  # a path is no YAML
        first = update_draft(run, log, overrides=few)
        assert set(first.metrics) == {"requests", "prompts"}
        start = results_of(run)["merged_metrics"]["prompts"]["acceptance"]
        assert first.baseline_metrics["prompts"]["acceptance"] == pytest.approx(start, abs=1e-4)
        second = update_draft(run, log, size=12, overrides=few)
        assert second.model == str(run / "updates" / "0001" / "merged")
        buffer = (run / "updates" / "replay-0002.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in buffer] == [*rows[-2:], *rows], "the newest ones, in order"
        with pytest.raises(PeftlabError, match="no run here"):
            update_draft(tmp_path, log)
        with pytest.raises(PeftlabError, match=r"no such directory \(did you mean"):
            update_draft(run.with_name("a #2"), log)

    def test_heads_that_train_with_their_target_are_not_updated(self, heads: Path, tmp_path: Path) -> None:
        run = shutil.copytree(heads, tmp_path / "run")
        (run / "adapter").mkdir()  # as the LoRA of Medusa-2 leaves it
        for update in (update_draft, update_live):
            with pytest.raises(PeftlabError, match="its method trains the target, which must not change between"):
                update(run, tmp_path / "log.jsonl")


class TestRefused:
    """Mistakes that are told before anything expensive starts."""

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["draft={kind: model, truncate: {layers: [0, 5]}}"], "no layer 5; the target has 0 to 4"),
            (["data.on_policy=1.2"], "from 0 to 1"),
            (["objective.name=topk_kl"], "data.top_k stores none"),
            (["objective.name=ce", "data.on_policy=0.5"], "needs the target's logits"),
            (["data.max_new_tokens=600"], "the target's context"),
            (["train.max_length=16"], "train.max_length; raise it"),
            (["train.packing=true"], "train.packing: a draft does not take it"),
            (["data.held_out=10"], "leaves none of 10 prompts"),
            (["data.max_prompts=1"], "a single request cannot be both trained on and held out"),
            (["data.prompts=[]"], "no prompt in it"),
            (["method={name: medusa}"], "unknown method 'medusa'; one of lora"),
            (["method={name: lora, trunk: {r: 2}}"], "method.trunk: unknown key"),
            (
                ["draft={truncate: {layers: [0]}}"],
                "draft.kind: missing; write draft={kind: model, ...}; one of model, early_exit",
            ),
            (["method=null"], "no parameters of its own to train"),
            (["~draft"], "draft: missing"),
            (["method={name: houlsby}", "merge=true"], "no linear fold"),
            (["early_exit=true", "draft={truncate: {layers: [0, 2]}}"], "early_exit: unknown key"),
            (["draft={kind: early_exit, exits: [5]}"], "draft.exits: 5 is past the last exit; the target has 5 layers"),
            (["objective.selective=0.4"], "needs a reference"),
            (["vocabulary=64"], "vocabulary: unknown key (did you mean 'draft.vocabulary'?)"),
            (["draft={kind: early_exit, exits: [3], vocabulary: 64}"], "draft.vocabulary: unknown key"),
            (["draft.vocabulary=64", "merge=false"], "remove merge: false"),
            (["draft.vocabulary=64", "method={name: houlsby}"], "has no linear fold"),
            (["acceptance_head=true", "method=null", "draft={kind: medusa}"], "there is none with heads"),
            (["policy=confidnce:0.3"], "policy: confidnce:0.3: one of fixed[:N], confidence[:T], heuristic"),
            (["policy=head"], "policy: head: reads a trained head; set acceptance_head: true"),
            (["policy=goodput", "method=null", "draft={kind: medusa}"], "heads draft trees"),
            (["draft_window=4:0"], "draft_window: 4:0: SINKS:LAST"),
            (
                ["draft_window=4:64", "method=null", "draft={kind: medusa}"],
                "limits the cache of a draft; heads have none",
            ),
            (["draft_window=4:64", "draft={kind: early_exit, exits: [2]}"], "an early exit drafts in the target's"),
            (["draft_window=4:64", "method=null", "draft={kind: dflash}"], "a block is drafted at once"),
            (
                ["draft_window=4:64", "method=null", "draft={kind: eagle3, image_tokens: 0}"],
                "does not go with draft.image_tokens",
            ),
            (["gamma=65"], "gamma: expected whole number from 1 to 64, got 65"),
            (["data.samples=4", "data.temperature=0"], "greedy continuations are all the same"),
            (["method={name: lora, target_modules: [lm_head]}"], "cannot be trained as part of a draft"),
        ],
    )
    def test_recipe(self, stories: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
        assert message in refused(stories, tmp_path / "out", *overrides)

    def test_an_empty_prompt_file(self, stories: Path, tmp_path: Path) -> None:
        (tmp_path / "none.txt").write_text("\n")
        assert "no prompt in it" in refused(stories, tmp_path / "out", f"data.prompts={tmp_path / 'none.txt'}")

    def test_a_draft_that_does_not_fit(self, stories: Path, tmp_path: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(stories)
        draft = tmp_path / "draft"
        tiny(0, vocab=520).save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        message = refused(stories, tmp_path / "out", f"draft={draft}")
        assert "520 rows, the target's has 512" in message and "resize_token_embeddings(512)" in message
        tiny(0, vocab=512).save_pretrained(draft)
        longer = ["data.max_new_tokens=80", "train.max_length=100"]
        assert "its context is 64 tokens" in refused(stories, tmp_path / "out", f"draft={draft}", *longer)
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        tokenizer.save_pretrained(draft)
        target = tmp_path / "target"
        AutoModelForCausalLM.from_pretrained(stories).save_pretrained(target)
        tokenizer.chat_template = "{{ messages[0]['content'] }}\n"
        tokenizer.save_pretrained(target)
        chat = refused(stories, tmp_path / "out", f"target={target}", f"draft={draft}")
        assert "chat template is not the target's" in chat
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(draft)
        other = refused(stories, tmp_path / "out", f"draft={draft}")
        assert "'<new>' (target None, draft 512)" in other

    def test_half_precisions(self) -> None:
        from types import SimpleNamespace

        from peftlab.drafting.target import check_dtypes

        check_dtypes(SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(dtype=torch.float32))
        with pytest.raises(PeftlabError, match="stored in float16, the target in bfloat16"):
            check_dtypes(SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(dtype=torch.float16))
