"""The benchmark and its commands: figures agree with each other, and only tokens of the output are counted."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy
import pytest
import torch
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding import benchmark as benches
from peftlab.decoding.benchmark import Question, Settings, drafted_text, measure_pool, pieces
from peftlab.decoding.decode import Fixed, Generation, Step, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import (
    Conditions,
    OverlapMeter,
    RateIntervals,
    Timings,
    Watch,
    acceptance_statistics,
    rate_intervals,
    relative_spread,
    step_seconds,
    uncertain,
    verdict,
)
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import NGramDrafter, PromptLookup, SuffixAndDraft, SuffixLookup, TokenRecycling
from peftlab.decoding.planning import plan_from_repeats
from peftlab.decoding.sampling import Sampling, Verifier, verify_chain, verify_tree
from peftlab.decoding.state_drafters import FeatureDrafter, HeadsDrafter
from peftlab.drafting.config import MedusaDraft
from peftlab.drafting.heads import MedusaHeads, MedusaKind, write_medusa
from peftlab.drafting.state_network import default_features
from peftlab.drafting.target import truncate
from peftlab.environment import describe_cpu
from peftlab.errors import PeftlabError
from peftlab.files import to_json
from peftlab.models.load import load_base, load_tokenizer
from peftlab.tasks.prompts import Prompt, encode, read_prompts, spread
from tests.byte_tokens import byte_tokenizer
from tests.command_line import invoke
from tests.eagle_models import trained_eagle


@pytest.fixture(scope="module")
def draft_dir(stories_model, stories_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("draft")
    truncate(stories_model, range(4)).save_pretrained(path)
    stories_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Once upon a time", "And then?"]},
        {"prompt": "Tom and Lily", "category": "roleplay"},
        {"text": "The dog", "id": "x", "category": "writing"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_statistics_by_hand():
    steps = [Step(3, 3, 4), Step(3, 0, 1), Step(3, 1, 2), Step(0, 0, 1), Step(2, 2, 2)]
    result = acceptance_statistics([Generation([0] * 6, "eos", steps[:3]), Generation([0] * 4, "eos", steps[3:])])
    assert result.tau == 10 / 5
    # Tried: 4, then 3 of which 1 falls, then 1: position by position 3/4, 2/3, 1/1.
    assert result.acceptance_by_position == [3 / 4, 2 / 3, 1.0]
    assert result.acceptance == 6 / 8
    assert (result.drafted, result.accepted, result.steps) == (11, 6, 5)
    assert result.histogram == {"1": 2, "2": 2, "4": 1}
    assert result.accepted_runs == {"0": 2, "1": 1, "2": 1, "3": 1} and result.tau_without_bonus == 6 / 5
    assert acceptance_statistics([Generation()]).tau is None


def test_overlap_is_that_of_the_models(stories_model):
    """Against both models run over the finished text."""
    draft = truncate(stories_model, range(3))
    overlap = OverlapMeter(Sampling())
    drafter = ModelDrafter(build_engine(draft, pack=False))
    target = build_engine(stories_model, pack=False)
    from peftlab.decoding.decode import StoppingCriteria

    (output,) = decode(target, [[1]], StoppingCriteria(40), drafter, policy=partial(Fixed, 3), observe=overlap)
    ids = torch.tensor([[1, *output.tokens]])
    with torch.inference_mode():
        p, q = (m(ids).logits[0, :-1].softmax(-1) for m in (stories_model, draft))
    # The positions looked at are those of the accepted tokens, and of the first rejected one.
    looked, began = [], 0
    for step in output.steps:
        looked += range(began, began + min(step.accepted + 1, step.drafted))
        began += step.emitted
    p, q = p[looked], q[looked]
    result = overlap.result()
    assert overlap.positions == len(looked)
    assert result.overlap == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)
    assert result.argmax == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert result.p_of_argmax == pytest.approx(float(p.gather(1, q.argmax(-1)[:, None]).mean()), abs=1e-5)
    assert result.argmax == acceptance_statistics([output]).acceptance  # greedy: the same thing
    # Tokens past the end of sequence are no output, and are not counted.
    overlap, ending = OverlapMeter(Sampling()), StoppingCriteria(40, frozenset({output.tokens[4]}))
    (ended,) = decode(target, [[1]], ending, drafter, policy=partial(Fixed, 8), observe=overlap)
    assert overlap.positions == sum(min(step.accepted + 1, step.drafted) for step in ended.steps)


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.0), (2, 0.0), (1, 0.8)])
def test_bench_verb(stories, draft_dir, prompt_file, tmp_path, batch, temperature):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    shown = invoke(
        "draft", "bench", "--target", stories, "--draft", draft_dir, "--prompts", prompt_file, "--max-new-tokens", 24,
        "--gamma", 3, "--batch-size", batch, "--temperature", temperature, "--repeats", 1, "--json", out, "--html", page,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert shown.exit_code == 0 and result["verdict"] in shown.stdout.replace("\n", " ")
    assert set(result["conditions"]) == {"load", "cores", "running", "spread", "doubts"}
    assert result["verdict"].startswith("uncertain") == bool(result["conditions"]["doubts"])
    low, high = result["speedup_interval"]
    assert low <= high
    assert result["gamma"] == 3 and result["lossless"] is True and result["divergences"] == []
    weights = [load_base(str(model), "AutoModelForCausalLM")[0] for model in (stories, draft_dir)]
    assert result["weights"] == {
        name: {"dtype": "fp32", "packed": list(build_engine(model).packed)}
        for name, model in zip(("target", "draft"), weights, strict=True)
    }
    printed = shown.stdout.replace("\n", " ")
    kept = ", ".join(result["weights"]["target"]["packed"])
    assert f"{describe_cpu()}; weights: target in fp32 ({kept}); draft in fp32" in printed
    assert result["cpu"]["features"] == describe_cpu().features
    assert result["lossless_by"] == ("construction" if temperature else "comparison")
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["baseline_tokens_per_second"])
    runs = {int(n): steps for n, steps in result["accepted_runs"].items()}
    assert result["tau_without_bonus"] == pytest.approx(sum(n * steps for n, steps in runs.items()) / result["steps"])
    assert 0 < result["tau"] - result["tau_without_bonus"] < 1.001 and set(runs) <= set(range(4))
    shown_kinds = [piece["kind"] for piece in result["example"]["pieces"]]
    assert len(shown_kinds) - shown_kinds.count("rejected") == 24 and result["example"]["prompt"] == "Once upon a time"
    assert len(result["acceptance_by_position"]) == 3 and 0 < result["acceptance"] < 1
    assert result["tau"] == pytest.approx(
        sum(int(n) * steps for n, steps in result["histogram"].items()) / sum(result["histogram"].values())
    )
    assert list(result["drafters"]) == ["draft", "suffix+draft", "lookup", "suffix", "recycling", "ngram"]
    assert all(of["lossless"] for of in result["drafters"].values())
    assert 0 < result["alpha"]["overlap"] < 1 and 0 < result["overhead"] < 1
    assert result["drafters"]["lookup"]["alpha"] is None
    for found in result["drafters"].values():
        assert sum(found["time"].values()) == pytest.approx(1) and min(found["time"].values()) > 0
    assert result["drafters"]["draft"]["time"]["draft"] > result["drafters"]["lookup"]["time"]["draft"]
    words = " ".join(shown.stdout.split())
    assert "draft: time: target" in words and ("S = tau / (C(4) + D)" in words) == (batch == 1)
    if batch == 1:
        assert result["gain"]["gamma"] == 3 and result["gain"]["tau"] == result["tau"]
    assert [(p["id"], p["category"]) for p in result["prompts"]] == [
        ("81", "writing"), ("2", "roleplay"), ("x", "writing"),
    ]  # fmt: skip
    assert all(len(p["ids"]) == 24 for p in result["prompts"])
    if not temperature:
        assert all(p["ids"] == p["baseline_ids"] for p in result["prompts"])
    assert result["categories"]["writing"]["prompts"] == 2
    assert (result["categories"]["writing"]["speedup"] is None) == (batch == 2)  # a batch of two categories
    assert page.read_text().count("<svg") == 2 and "Acceptance by category" in page.read_text()
    assert page.read_text().count("<ins") == shown_kinds.count("accepted")


def test_bench_without_a_draft_and_prompts_that_do_not_fit(stories, tmp_path):
    prompts, out = tmp_path / "p.txt", tmp_path / "out.json"
    prompts.write_text("The dog\n\n" + "long " * 600 + "\n")
    shown = invoke("draft", "bench", "--target", stories, "--prompts", prompts, "--repeats", 1, "--json", out)
    result = json.loads(out.read_text())
    assert result["drafter"] == "lookup" and result["skipped"] == ["3"] and len(result["prompts"]) == 1
    assert result["speedup_interval"] is None and "on a single batch" in result["verdict"], "one prompt"
    assert "(no interval)" in shown.stdout
    assert "1 prompt left out: no room for an output in the model's context" in shown.stdout.replace("\n", " ")


def test_the_acceptance_of_ngrams_rises_with_their_order(stories, prompt_file, tmp_path):
    """The procedure of the paper's table of alpha: uniform, unigram and bigram drafts, as overlap at temperature 1."""
    corpus, out = tmp_path / "corpus.txt", tmp_path / "out.json"
    corpus.write_text("Once upon a time, there was a little girl named Lily. She saw a big dog. " * 5)
    orders = [option for order in (2, 1, 0) for option in ("--drafter", f"ngram:{order}")]
    shown = invoke(
        "draft", "bench", "--target", stories, "--prompts", prompt_file, "--max-new-tokens", 24, "--repeats", 1, *orders,
        "--corpus", corpus, "--temperature", 1, "--seed", 3, "--json", out,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert list(result["drafters"]) == ["ngram:2", "ngram:1", "ngram:0"] and result["drafter"] == "ngram:2"
    bigram, unigram, uniform = (of["alpha"]["overlap"] for of in result["drafters"].values())
    assert 0 < uniform < unigram < bigram < 1
    assert all(of["lossless"] for of in result["drafters"].values())
    assert f"ngram:0: alpha as overlap {uniform:.3f}" in shown.stdout.replace("\n", " ")
    with pytest.raises(PeftlabError, match=r"drafter ngrm:2: one of .*ngram\[:N\].*did you mean 'ngram'"):
        invoke("draft", "bench", "--target", stories, "--prompts", prompt_file, "--drafter", "ngrm:2")


def test_free_drafters_forget_between_passes(stories_model):
    """Else the second pass over the same prompts would find its own answers."""
    made = []

    def make():
        made.append(TokenRecycling())
        return made[-1]

    settings = benches.Settings(8, repeats=3)
    questions = [benches.Question("1", "all", [1, 5])]
    benches.bench(build_engine(stories_model), {"recycling": make}, questions, settings)
    assert len(made) == 1 + 1 + 3 + 1 + 1  # asked whether it waits, warm-up, passes, overlap, its gain by parts


def test_another_way_to_decode_is_timed_on_the_same_prompts(stories_model, generate_greedy):
    questions = [benches.Question(str(i), "all", [1, i]) for i in (5, 9)]

    def library():
        return lambda batch: [Generation(generate_greedy(stories_model, q.ids, 8)) for q in batch]

    target = build_engine(stories_model, pack=False)
    run = benches.compare(
        target, {"r": TokenRecycling}, questions, benches.Settings(8, repeats=2), others={"other": library}
    )
    found = run.result("other")
    assert found.lossless and found.tokens_per_second > 0 and found.statistics.tau is None
    assert [len(times) for times in run.records["other"].seconds] == [2, 2]


def test_a_sample_depends_on_the_number_of_its_prompt_alone(stories_model, target):
    """Not on the batch size, the repeat or whether a pool decodes it; equal prompts have different samples."""
    questions = [Question("long", "all", [1] * 512), *(Question(str(i), "all", [1]) for i in range(4))]
    found = []
    for size, repeats in ((1, 1), (2, 2), (4, 1)):
        settings = Settings(24, sampling=Sampling(1.0, seed=5), batch_size=size, repeats=repeats)
        run = benches.compare(target, {"draft": partial(layers, stories_model)}, questions, settings)
        found += [{name: [output.tokens for output in of.outputs] for name, of in run.records.items()}]
        fitting = benches.fitting_questions(target, questions)
        for name, make in (("plain", None), ("draft", partial(layers, stories_model))):
            for pooled in (False, True):
                mode = benches._DecodingMode(target, settings, fitting, name, make, pooled)
                assert mode.outputs() == found[-1][name]
    alone = [
        decode(target, [[1]], StoppingCriteria(24), sampling=Sampling(1.0, seed=5 + i))[0].tokens for i in range(4)
    ]
    assert found[0]["plain"] == alone and len(set(map(tuple, alone))) == 4
    assert found[0] == found[1] == found[2]


def test_bench_refuses(stories_model):
    target, question = build_engine(stories_model), benches.Question("1", "all", [1])
    with pytest.raises(PeftlabError, match="batch_size: 0 is less than 1"):
        benches.Settings(3, batch_size=0)
    with pytest.raises(PeftlabError, match="repeats: 0 is less than 1"):
        benches.Settings(3, repeats=0)
    with pytest.raises(PeftlabError, match="none fits the model's context"):
        benches.bench(target, {"d": None}, [benches.Question("1", "all", [1] * 512)], benches.Settings(3))
    with pytest.raises(PeftlabError, match="drafters: none given"):
        benches.bench(target, {}, [question], benches.Settings(3))


def test_plan_verb(stories, draft_dir, tmp_path):
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    shown = invoke(
        "draft", "plan", "--target", stories, "--draft", draft_dir, "--max-gamma", 2, "--repeats", 1, "--context", 8,
        "--json", out, "--html", page,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert result["verdict"] in shown.stdout and result["warnings"] == [] and page.exists()
    shown = invoke(
        "draft", "plan", "--target", draft_dir, "--draft", stories, "--max-gamma", 1, "--repeats", 1, "--context", 8
    )
    assert "parameters) is no smaller than the target (214,592)" in shown.stdout


@pytest.mark.parametrize("how", ["plain", "lookup", "draft", "suffix and draft"])
def test_generate_verb(stories, draft_dir, stories_model, stories_tokenizer, generate_greedy, how, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"answer": "Once upon a time, there was a little girl named Lily."}\n', encoding="utf-8")
    extra = {
        "plain": [],
        "lookup": ["--drafter", "lookup"],
        "draft": ["--draft", draft_dir],
        "suffix and draft": ["--drafter", "suffix", "--draft", draft_dir, "--corpus", corpus],
    }[how]
    shown = invoke(
        "generate", "--target", stories, "--prompt", "Once upon a time", "--max-new-tokens", 30, "--no-pack", *extra
    )
    ids = generate_greedy(stories_model, stories_tokenizer("Once upon a time").input_ids, 30)
    assert shown.stdout == stories_tokenizer.decode(ids) + "\n"
    assert "30 tokens in" in shown.stderr and "tokens/s" in shown.stderr and "ended by length" in shown.stderr
    assert ("acceptance" in shown.stderr) == (how != "plain")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gamma", "0"], "gamma: 0 drafts nothing"),
        (["--policy", "fixd"], r"did you mean 'fixed'\?"),
        (["--top-k", "3"], "temperature: 0 is greedy"),
        (["--drafter", "lokup"], r"did you mean 'lookup'\?"),
        (["--drafter", "draft"], "no draft model given"),
        (["--draft", "nowhere/else/is"], "no such file"),
        (["--draft", "exit:0"], "draft exit:0: exits start at 1; exit:K is the target's first K"),
        (["--draft", "no/such", "--drafter", "pearl", "--lossy", "typical"], "lossy typical: drafter pearl verifies"),
        (["--draft", "x", "--drafter", "lookup"], "give one of them; only drafters suffix, pearl and one_pass"),
        (["--drafter", "one_pass"], "drafter one_pass: needs a gated_lora draft; give a draft"),
        (["--draft", "x", "--drafter", "lookup+draft"], "only drafters suffix, pearl and one_pass go with a draft"),
        (["--drafter", "lookup", "--corpus", "x"], "only drafter suffix copies from it, and ngram counts it"),
        (["--drafter", "suffix", "--corpus", "no/such"], "corpus 'no/such': no such file"),
        (["--dtype", "int4"], "one of fp32, bf16, fp16"),
        (["--dtype", "float32"], "write fp32"),
        (["--draft-dtype", "bfloat16"], "draft_dtype bfloat16: .* write bf16"),
        (["--draft-dtype", "bf16"], "draft_dtype bf16: no draft is given whose weights would have it"),
        (["--drafter", "lookup", "--draft-dtype", "bf16"], "draft_dtype bf16: no draft is given"),
        (["--gamma", "9"], "gamma 9: nothing is drafted; give a draft or a drafter"),
        (["--chat"], "no chat template"),
    ],
)
def test_generate_refuses(stories, arguments, reason):
    with pytest.raises(PeftlabError, match=reason):
        invoke("generate", "--target", stories, "--prompt", "x", *arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--drafter", "lookup", "--corpus", "x"], "corpus x: only drafter suffix copies from it, and ngram counts it"),
        (["--drafter", "lookup", "--draft-dtype", "bf16"], "draft_dtype bf16: no draft is given whose weights would"),
    ],
)
def test_bench_refuses_what_nothing_uses(stories, prompt_file, arguments, reason):
    with pytest.raises(PeftlabError, match=reason):
        invoke("draft", "bench", "--target", stories, "--prompts", prompt_file, *arguments)


def test_prompts_through_a_chat_template(stories_tokenizer):
    prompt = Prompt("1", "all", "hello", [{"role": "user", "content": "hello"}])
    literal = encode(stories_tokenizer, prompt)
    assert literal == stories_tokenizer("hello").input_ids
    import copy

    chatty = copy.deepcopy(stories_tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    assert encode(chatty, prompt) == chatty("<user>hello!", add_special_tokens=False).input_ids
    assert encode(chatty, Prompt("1", "all", "hello")) == literal


def test_a_template_that_raises_is_told_with_its_row(stories_tokenizer, tmp_path):
    import copy

    strict = copy.deepcopy(stories_tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "p.jsonl").write_text('{"text": "fine"}\n{"question": "Why?"}\n')
    literal, asked = read_prompts(tmp_path / "p.jsonl")
    assert encode(strict, literal) == strict("fine").input_ids
    with pytest.raises(PeftlabError, match=r"p\.jsonl:2: the tokenizer's chat template .*: roles must alternate"):
        encode(strict, asked)


def test_an_empty_prompt_begins_with_bos_or_not_at_all(stories_tokenizer):
    assert encode(stories_tokenizer, Prompt("1", "all", "")) == [1]

    class Bare:
        bos_token_id = None

        def __call__(self, text):
            from types import SimpleNamespace

            return SimpleNamespace(input_ids=[])

    with pytest.raises(PeftlabError, match="prompt 7: empty"):
        encode(Bare(), Prompt("7", "all", ""))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "p.jsonl:2: not a JSON object"),
        ("[" * 100_000, "p.jsonl:2: not a JSON object .nested too deeply"),
        ("[]", "p.jsonl:2: not a JSON object but"),
        ('{"promt": "x"}', "p.jsonl:2: no prompt"),
        ('{"turns": []}', "p.jsonl:2: turns is not a text, chat messages or token ids"),
        ('{"messages": [{"role": "user"}]}', "p.jsonl:2: messages is not"),
        ('{"prompt": 3}', "p.jsonl:2: prompt is not"),
    ],
)
def test_prompt_files_that_are_wrong(tmp_path, line, reason):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(PeftlabError, match=reason):
        read_prompts(path)


def test_a_table_in_the_layout_of_speed_bench(tmp_path):
    """Its columns and categories; of a conversation the first turn is asked."""
    import pyarrow
    from pyarrow import parquet

    rows = [
        {"question_id": "a1", "category": category, "sub_category": "x", "turns": turns, "source": "s", "src_id": "7",
         "difficulty": "", "multiturn": len(turns) > 1}
        for category, turns in [("coding", ["Sort a list.", "Faster."]), ("rag", ["Who wrote it?"])]
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    first, second = read_prompts(tmp_path / "test.parquet")
    assert (first.category, first.text, first.id) == ("coding", "Sort a list.", "a1")
    assert second.category == "rag" and second.messages == [{"role": "user", "content": "Who wrote it?"}]


@pytest.mark.parametrize("field", ["question", "instruction"])
def test_a_question_is_one_turn_of_a_chat(tmp_path, field):
    (tmp_path / "p.jsonl").write_text(json.dumps({field: "Why?", "answer": "So."}))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.messages == [{"role": "user", "content": "Why?"}] and prompt.text == "Why?"


def test_alpacas_rows_ask_with_their_input(tmp_path):
    rows = [{"instruction": "Add.", "input": more, "output": "3"} for more in ("1 and 2", "", None)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl")] == ["Add.\n1 and 2", "Add.", "Add."]
    assert read_prompts(tmp_path / "p.jsonl", field="instruction")[0].text == "Add."
    with pytest.raises(PeftlabError, match=r"p\.jsonl:2: input is empty"):
        read_prompts(tmp_path / "p.jsonl", field="{instruction} {input}")


def test_prompt_files_that_hold_nothing(tmp_path):
    (tmp_path / "p.txt").write_text("\n\n")
    with pytest.raises(PeftlabError, match="no prompt in it"):
        read_prompts(tmp_path / "p.txt")
    with pytest.raises(PeftlabError, match="no such file"):
        read_prompts(tmp_path / "q.txt")


def test_spec_bench(shared):
    prompts = read_prompts(shared / "data" / "lm" / "spec_bench_question.jsonl")
    assert len(prompts) == 480 and len({p.category for p in prompts}) == 13
    few = spread(prompts, 26)
    assert len(few) == 26 and {p.category for p in few} == {p.category for p in prompts}
    assert [prompts.index(p) for p in few] == sorted(prompts.index(p) for p in few)
    with pytest.raises(PeftlabError, match="max_prompts: 0"):
        spread(prompts, 0)


@pytest.fixture(scope="module")
def heads_dir(stories, tmp_path_factory):
    model, _ = load_base(str(stories), "AutoModelForCausalLM")
    return write_medusa(
        MedusaKind.attach_heads(model, MedusaDraft(heads=3)).heads, tmp_path_factory.mktemp("heads") / "heads"
    )


@pytest.mark.parametrize(("width", "gamma", "draft_dtype"), [(1, 3, "fp32"), (3, 6, "fp32"), (2, 6, "bf16")])
def test_heads_are_drafts_of_the_verbs(stories, heads_dir, prompt_file, tmp_path, width, gamma, draft_dtype):
    out = tmp_path / "bench.json"
    options = ["--gamma", gamma, "--width", width, "--draft-dtype", draft_dtype, "--max-new-tokens", 12]
    arguments = ["--target", stories, "--draft", heads_dir, *options]
    run = invoke("draft", "bench", *arguments, "--prompts", prompt_file, "--repeats", 1, "--json", out)
    assert run.exit_code == 0, run.output
    result = json.loads(out.read_text())
    assert (result["drafter"], result["lossless"], result["width"]) == ("draft", True, width)
    assert list(result["weights"]) == ["target"]
    assert result["drafters"]["draft"]["tau"] >= 1
    assert 0 <= result["overhead"] < 1
    plain = invoke("generate", "--target", stories, "--prompt", "Once upon a time", "--max-new-tokens", 12)
    headed = invoke("generate", *arguments, "--prompt", "Once upon a time")
    assert headed.exit_code == 0, headed.output
    assert headed.stdout.splitlines()[0] == plain.stdout.splitlines()[0]


def test_settings_that_measure_nothing_are_refused_before_a_model_is_loaded(stories, draft_dir, prompt_file, tmp_path):
    """Neither model has weights here: reading them would be another error."""
    bare = {}
    for name, source in (("target", stories), ("draft", draft_dir)):
        bare[name] = tmp_path / name
        shutil.copytree(source, bare[name], ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    pair = ["--target", bare["target"], "--draft", bare["draft"]]
    with pytest.raises(PeftlabError, match="repeats: 0 measures nothing"):
        invoke("draft", "plan", *pair, "--repeats", 0)
    with pytest.raises(PeftlabError, match="max_gamma: 0 drafts nothing"):
        invoke("draft", "plan", *pair, "--max-gamma", 0)
    with pytest.raises(PeftlabError, match="repeats: 0 is less than 1"):
        invoke("draft", "bench", *pair, "--prompts", prompt_file, "--repeats", 0)
    with pytest.raises(PeftlabError, match="width 3: 1, or more with a draft, whose trees it limits"):
        invoke("draft", "bench", *pair[:2], "--prompts", prompt_file, "--width", 3)
    with pytest.raises(PeftlabError, match="width 0: 1, or more with a draft"):
        invoke("draft", "bench", *pair, "--prompts", prompt_file, "--width", 0)
    with pytest.raises(PeftlabError, match="cannot be loaded"):
        invoke("draft", "plan", *pair)
    tokenizer = load_tokenizer(str(stories))
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(bare["draft"])
    with pytest.raises(PeftlabError, match="its tokenizer is not the target's: 1 entries differ, the first is 'zebra'"):
        invoke("draft", "plan", *pair)


def test_a_token_outside_the_vocabulary_is_named_with_file_and_line(stories, tmp_path):
    file = tmp_path / "oov.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in ([1, 5], [1, 9], [1, 999])))
    with pytest.raises(PeftlabError, match=r"oov\.jsonl:3: token 999 is outside the vocabulary of 512$"):
        invoke("draft", "bench", "--target", stories, "--prompts", file, "--drafter", "lookup")


def test_prompts_without_a_category_among_others_are_uncategorised(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "category": "math"}\n{"prompt": "b"}\n{"prompt": "c", "category": ""}\n')
    assert [prompt.category for prompt in read_prompts(file)] == ["math", "uncategorised", "uncategorised"]
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert {prompt.category for prompt in read_prompts(file)} == {"all"}


def test_heads_that_do_not_fit(stories, heads_dir, draft_dir, prompt_file, tmp_path):
    asked = ["--target", stories, "--prompts", prompt_file]
    with pytest.raises(PeftlabError, match="width 2"):
        invoke("generate", "--target", stories, "--prompt", "Once", "--width", 2)
    with pytest.raises(PeftlabError, match="such drafts have no step for each token to plan"):
        invoke("draft", "plan", "--target", stories, "--draft", heads_dir)
    with pytest.raises(PeftlabError, match=r"draft swift: searches for the sublayers to skip, .* use draft bench"):
        invoke("draft", "plan", "--target", stories, "--draft", "swift")
    with pytest.raises(PeftlabError, match=r"draft del: chooses among the exits, .* while decoding; use draft bench"):
        invoke("draft", "plan", "--target", stories, "--draft", "del")
    config = json.loads((heads_dir / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes((heads_dir / "model.safetensors").read_bytes())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 1024}))
    with pytest.raises(PeftlabError, match="heads for states of 64 and 1024 tokens, but the target has 64 and 512"):
        invoke("draft", "bench", *asked, "--draft", other)


def test_generate_says_on_what_processor_and_weights(stories, draft_dir, tmp_path):
    out = tmp_path / "out.json"
    told = ("--prompt", "Once", "--max-new-tokens", 4, "--draft-dtype", "bf16", "--json", out)
    shown = invoke("generate", "--target", stories, "--draft", draft_dir, *told)
    assert shown.exit_code == 0, shown.output
    result = json.loads(out.read_text())
    packed = build_engine(load_base(str(stories), "AutoModelForCausalLM")[0]).packed
    assert result["weights"]["target"] == {"dtype": "fp32", "packed": list(packed)}
    assert result["weights"]["draft"]["dtype"] == "bf16" and result["cpu"] == to_json(describe_cpu())


NEW = 20


def layers(model):
    return ModelDrafter(build_engine(truncate(model, range(4)), pack=False))


DRAFTERS = {
    "plain": lambda m: None,
    "layers": layers,
    "early exit": lambda m: ModelDrafter(
        build_engine(truncate(m, range(4), share=True), pack=False), shares_cache=True
    ),
    "heads": lambda m: HeadsDrafter(MedusaHeads(m.get_output_embeddings().weight, 4), width=4),
    "eagle tree": lambda m: FeatureDrafter(trained_eagle(m), 3),
    "lookup": lambda m: PromptLookup(),
    "n-gram": lambda m: NGramDrafter(),
    "recycling": lambda m: TokenRecycling(),
    "suffix+layers": lambda m: SuffixAndDraft(SuffixLookup(shortest=2), layers(m)),
}


@pytest.fixture(scope="module")
def target(stories_model):
    return build_engine(stories_model, pack=False, features=default_features(5))


@pytest.fixture(scope="module")
def ends(target, uneven_prompts):
    """Tokens of some outputs, so that slots become free at different times."""
    plain = decode(target, uneven_prompts, StoppingCriteria(NEW))
    return StoppingCriteria(NEW, frozenset({plain[1].tokens[8], plain[2].tokens[3]}))


@pytest.fixture(scope="module")
def expected(target, uneven_prompts, ends):
    outputs = [decode(target, [prompt], ends)[0] for prompt in uneven_prompts]
    assert len({len(output.tokens) for output in outputs}) > 2
    return [(output.tokens, output.reason) for output in outputs]


@pytest.mark.parametrize("pool", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_pool_gives_the_outputs_of_single_sequences(
    stories_model, target, uneven_prompts, ends, expected, name, pool
):
    drafter, together = DRAFTERS[name](stories_model), []

    def observe(rows, verified):
        together.append(len(rows))

    found = decode(target, uneven_prompts, ends, drafter, policy=partial(Fixed, 4), pool=pool, observe=observe)
    assert [(output.tokens, output.reason) for output in found] == expected
    full = together.count(pool)
    assert max(together) == pool and together[:full] == [pool] * full, "never less while a prompt waits"
    if name in ("layers", "early exit", "heads", "eagle tree"):
        assert acceptance_statistics(found).accepted > 0


def test_a_pool_of_nothing(target):
    with pytest.raises(PeftlabError, match="pool: 0 sequences; give 1 or more"):
        decode(target, [[1]], StoppingCriteria(3), pool=0)


def test_sampling_in_a_pool_is_that_of_single_sequences(stories_model, target, uneven_prompts, ends):
    sampling, policy = Sampling(temperature=0.9, seed=4), partial(Fixed, 3)
    found = decode(target, uneven_prompts, ends, layers(stories_model), policy=policy, sampling=sampling, pool=2)
    for i, prompt in enumerate(uneven_prompts):
        own = replace(sampling, seed=sampling.seed + i)
        alone = decode(target, [prompt], ends, layers(stories_model), policy=policy, sampling=own)
        assert alone[0].tokens == found[i].tokens


def test_a_pool_verifies_as_asked(stories_model, target, uneven_prompts):
    used = []

    def chain(*arguments):
        used.append(arguments)
        return verify_chain(*arguments)

    settings = Settings(6, sampling=Sampling(1.0), batch_size=2, repeats=1, verifier=Verifier(chain, verify_tree))
    questions = [Question(str(i), "", prompt) for i, prompt in enumerate(uneven_prompts[:3])]
    measured = measure_pool(target, "draft", partial(layers, stories_model), questions, settings)
    assert measured.equal is None and set(measured.pooled) == {"plain", "draft"}
    assert used


def test_bench_times_a_pool(stories, tmp_path):
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\nThe dog\n")
    settings = ["--draft", "exit:3", "--max-new-tokens", "8", "--repeats", "1", "--drafter", "lookup", "--pool"]
    shared = ["draft", "bench", "--target", str(stories), "--prompts", str(tmp_path / "p.txt"), *settings]
    shown = CliRunner().invoke(app, [*shared, "--batch-size", "2", "--json", str(tmp_path / "o.json")])
    assert shown.exit_code == 0, shown.output
    pool = json.loads((tmp_path / "o.json").read_text())["pool"]
    assert pool["equal"] is True and set(pool["static"]) == set(pool["pooled"]) == {"plain", "draft"}
    assert min(*pool["static"].values(), *pool["pooled"].values()) > 0
    assert "a pool that refills against static batches: plain" in shown.stdout.replace("\n", " ")
    with pytest.raises(PeftlabError, match="pool: a batch size of 1; give 2 or more"):
        raise CliRunner().invoke(app, shared).exception


TRACED, GAMMA = 56, 3
POLICY = partial(Fixed, GAMMA)
SETTINGS = Settings(TRACED, policy=POLICY)


@pytest.fixture(scope="module")
def draft_model(stories_model):
    return truncate(stories_model, range(4))


@pytest.mark.parametrize("drafter", ["draft", "recycling"])
def test_its_tokens_are_the_output_and_its_counts_the_steps(stories_model, stories_tokenizer, draft_model, drafter):
    make = {"draft": lambda: ModelDrafter(build_engine(draft_model, pack=False)), "recycling": TokenRecycling}[drafter]
    target, prompt = build_engine(stories_model, pack=False), stories_tokenizer("Once upon a time").input_ids
    found = drafted_text(target, SETTINGS, "draft", make(), Question("0", "", prompt), stories_tokenizer)
    (output,) = decode(target, [prompt], StoppingCriteria(TRACED), make(), policy=POLICY)
    kept = [piece for piece in found.pieces if piece.kind != "rejected"]
    assert len(kept) == TRACED and found.prompt == "Once upon a time"
    whole = stories_tokenizer.decode([*prompt, *output.tokens])
    assert whole == stories_tokenizer.decode(prompt) + "".join(piece.text for piece in kept)
    kinds = [piece.kind for piece in found.pieces]
    assert kinds.count("accepted") == sum(step.accepted for step in output.steps) > 0
    assert kinds.count("target") == sum(step.emitted - step.accepted for step in output.steps) > 0
    if drafter == "draft":  # a chain: what was not accepted was rejected, but where the output ended before
        rejected = sum(step.drafted - step.accepted for step in output.steps if step.emitted > step.accepted)
        assert kinds.count("rejected") == rejected > 0


def test_rejected_tokens_are_what_the_draft_would_have_written(stories_model, stories_tokenizer, draft_model):
    target, draft = build_engine(stories_model, pack=False), build_engine(draft_model, pack=False)
    prompt = stories_tokenizer("Tom and Lily").input_ids
    found = drafted_text(target, SETTINGS, "draft", ModelDrafter(draft), Question("0", "", prompt), stories_tokenizer)
    (output,) = decode(target, [prompt], StoppingCriteria(TRACED))
    ids, following, checked = list(prompt), iter(output.tokens), 0
    for before, piece in pairwise(found.pieces):
        if before.kind != "rejected":
            ids.append(next(following))
        if piece.kind == "rejected" and before.kind != "rejected":
            with torch.inference_mode():
                likeliest = int(draft_model(torch.tensor([ids])).logits[0, -1].argmax())
            assert stories_tokenizer.decode([*ids, likeliest]) == stories_tokenizer.decode(ids) + piece.text
            checked += 1
    assert checked >= 3


def test_a_character_of_several_tokens_is_shown_once():
    tokenizer = byte_tokenizer(None, [], bos="<s>", eos="</s>")
    before, ids = tokenizer("na").input_ids, tokenizer("ïve\n").input_ids
    found = pieces(tokenizer, before, ids, "target")
    assert [piece.text for piece in found] == ["", "ï", "v", "e", "\n"]
    assert [piece.text for piece in pieces(tokenizer, [*before, ids[0]], ids[1:3], "target")] == ["ï", "v"]


QUIET = Conditions(load=1.9, cores=2, running=0.99, spread=0.03)
BUSY = Conditions(load=8.1, cores=2, running=0.4, spread=0.6)


def test_doubts_name_what_was_seen():
    assert QUIET.doubts() == []
    assert Conditions(None, 2, None, None).doubts() == []
    assert BUSY.doubts() == [
        "load average 8.1 on 2 cores",
        "waiting for a core 60 % of the time",
        "repeats of the same work differ by 60 %",
    ]
    assert Conditions(8.1, 16, 0.99, 0.03).doubts() == [], "as many cores as are asked for"
    assert BUSY.as_json()["doubts"] == BUSY.doubts() and BUSY.as_json()["load"] == 8.1


def test_spread_is_that_of_the_same_work():
    assert relative_spread([[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]]) == 0
    assert relative_spread([[1.0, 2.0, 3.0]]) == pytest.approx(0.5)  # quartiles 1.5 and 2.5, median 2
    assert relative_spread([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [7.0, 7.0, 7.0]]) == 0
    assert relative_spread([[1.0], [2.0]]) is None


def test_a_thread_that_does_not_run_is_seen():
    """Asleep it waits as it would for a core."""
    with Watch(torch.device("cpu")) as watch:
        time.sleep(0.2)
    found = watch.conditions([[1.0, 1.0]])
    assert found.running is not None and found.running < 0.5
    assert found.spread == 0 and found.cores >= 1
    for waiting in (Watch(torch.device("meta")), Watch(torch.device("cpu"), waits=True)):
        with waiting as watch:
            time.sleep(0.01)
        assert watch.conditions([]).running is None, "the thread waits for the device, or for one of its own"


def plan_of(target, draft, conditions=QUIET):
    return plan_from_repeats(target, draft, conditions)


class TestPlan:
    """A plan has intervals."""

    def test_quiet_repeats_are_the_plan_of_their_medians(self):
        result = plan_of([[1.0, 1.01, 0.99], [1.02, 1.0, 1.01], [1.0, 1.0, 1.1]], [0.2, 0.2, 0.21])
        assert result.c == pytest.approx(0.2) and result.target_seconds == [1.0, 1.01, 1.0]
        low, high = result.c_interval
        assert low <= 0.2 <= high < 0.22
        assert result.target_range[0] == (0.99, 1.01) and result.draft_range == (0.2, 0.21)
        assert result.verdict.startswith("pays from an acceptance of")
        assert result.conditions.doubts() == []

    def test_a_busy_machine_concludes_nothing(self):
        """Target and draft are the same model; another process ran during the draft's steps."""
        same = [1.0, 1.1, 0.9, 1.0, 21.0]
        hit = [22.0, 1.0, 21.9, 25.0, 1.1]
        result = plan_of([same] * 3, hit, BUSY)
        low, high = result.c_interval
        assert low <= 1.1 and high > 20, "the interval contains c = 1"
        assert result.verdict.startswith("uncertain, the machine was busy (load average 8.1 on 2 cores; ")
        assert "by these times cannot pay here" in result.verdict

    def test_repeats_that_disagree_are_uncertain_on_a_quiet_machine_too(self):
        result = plan_of([[1.0] * 6, [1.2, 2.8] * 3], [0.1] * 6)
        low, high = result.cap_interval
        assert low <= 1 < high
        assert result.verdict.startswith("uncertain, as by some repeats a perfect draft reaches")

    def test_a_single_repeat_has_no_interval(self):
        result = plan_of([[1.0], [1.1]], [0.1], Conditions(0.1, 2, 0.99, None))
        assert result.c_interval is None and result.cap_interval is None

    def test_no_repeat_is_refused(self):
        with pytest.raises(PeftlabError, match="repeats: 0 measures nothing"):
            step_seconds({}, repeats=0)


class TestIntervals:
    """Prompts and repeats are both drawn anew."""

    def test_one_prompt_has_no_interval(self):
        one, other = Timings([10], [[1.0, 1.1, 0.9]]), Timings([10], [[2.0, 2.1, 1.9]])
        assert rate_intervals(one, other) == RateIntervals(rate=None, baseline=None, speedup=None)
        said = verdict(2.0, None)
        assert said == "2.00x plain decoding on a single batch, too few for an interval"

    def test_repeats_that_differ_widen_it(self):
        plain = Timings([10] * 4, [[2.0] * 5] * 4)
        still = rate_intervals(Timings([10] * 4, [[1.0] * 5] * 4), plain).speedup
        assert still == (2.0, 2.0)
        low, high = rate_intervals(Timings([10] * 4, [[0.5, 0.5, 1.0, 3.0, 3.0]] * 4), plain).speedup
        assert low < 1.5 and high > 2.2

    def test_prompts_that_differ_widen_it(self):
        plain = Timings([10] * 20, [[1.0]] * 20)
        low, high = rate_intervals(Timings([10] * 20, [[0.5], [3.0]] * 10), plain).speedup
        assert low < 2 / 3.5 < high

    def test_slow_moments_that_hit_both_cancel(self):
        """Both took turns, so that repeat i of one belongs to repeat i of the other."""
        noise = numpy.random.default_rng(1).uniform(1, 5, (6, 3))
        pair = [Timings([10] * 6, (scale * noise).tolist()) for scale in (1.0, 2.0)]
        found = rate_intervals(*pair)
        assert found.speedup == pytest.approx((2.0, 2.0))
        assert found.rate[1] > 1.2 * found.rate[0]

    def test_the_interval_covers_the_truth_as_often_as_it_says(self):
        """Prompts with noisy repeats, 200 times over: 95 % intervals of 12 prompts contain the true ratio in most."""
        dice = numpy.random.default_rng(0)
        hits = 0
        for _ in range(200):
            seconds = dice.lognormal(0, 0.3, (12, 1)) * dice.lognormal(0, 0.1, (12, 3))
            plain = 2 * dice.lognormal(0, 0.1, (12, 3)) * seconds.mean(1, keepdims=True)
            found = rate_intervals(Timings([10] * 12, seconds.tolist()), Timings([10] * 12, plain.tolist()), draws=300)
            low, high = found.speedup
            hits += low <= 2.0 <= high
        assert hits >= 170


def test_verdicts():
    assert verdict(2.0, (1.5, 2.5)).startswith("faster than plain")
    assert verdict(0.8, (0.7, 0.9)).startswith("slower than plain")
    assert verdict(1.1, (0.9, 1.2)).startswith("no clear difference")
    said = verdict(2.0, (1.5, 2.5), BUSY.doubts())
    assert said.startswith("uncertain, the machine was busy (load") and "by these times faster than plain" in said
    assert uncertain([], "faster") == "faster"
