"""Drafts for targets that see: prompts with images as ids, what a draft reads of an image, and that output is exact."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from peftlab.checkpoints.adapter import load_model
from peftlab.decoding.benchmark import acceptance_statistics
from peftlab.decoding.decode import StoppingCriteria, Verified, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.state_drafters import BlockDrafter, FeatureDrafter, mean_of_parts, state_drafter
from peftlab.drafting.block import BlockLoss, BlockStep
from peftlab.drafting.eagle import EagleStep
from peftlab.drafting.objectives import Objective
from peftlab.drafting.state_network import FeatureLoss, TargetWithNetwork, read_texts, unroll
from peftlab.errors import PeftlabError
from peftlab.models.image_tokens import LIMIT, draft_places, text_id
from peftlab.tasks.image_prompts import ImagePrompts
from peftlab.tasks.images import inputs_of
from peftlab.tasks.prompts import Prompt, encode, read_prompts
from tests.command_line import invoke
from tests.eagle_models import dflash, eagle, trained
from tests.image_models import save_digits, save_vision_language

READ = [None, 3, 0]
KINDS = {"eagle3": (eagle, EagleStep), "dflash": (dflash, BlockStep)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with digits, and prompts about one image, about two, and about none."""
    place = tmp_path_factory.mktemp("seen")
    save_digits(place / "digits", each=6)
    rows = []
    for i, path in enumerate(sorted((place / "digits").rglob("*.png"))):
        name = str(path.relative_to(place))
        parts = [{"type": "image", "path": name}, {"type": "text", "text": "Which digit?"[: 6 + i % 7]}]
        parts += [{"type": "image", "path": "digits/0/000.png"}] * (i % 4 == 3)
        rows.append({"messages": [{"role": "user", "content": parts}]})
    rows.insert(2, {"messages": [{"role": "user", "content": "Hello?"}]})
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def opened(name: str, place: Path) -> tuple[Any, list[list[int]], ImagePrompts]:
    """Return a random model, its prompts as ids, and what reads their images."""
    model = save_vision_language(name, place / name)
    images = ImagePrompts(str(model))
    prompts = read_prompts(place / "prompts.jsonl", most=6)
    ids = [encode(images.processor.tokenizer, prompt, True, images) for prompt in prompts]
    target, _ = load_model(str(model), "AutoModelForImageTextToText")
    images.attach(target)
    return target, ids, images


@pytest.fixture(scope="module")
def llava(place: Path) -> tuple[Any, list[list[int]], ImagePrompts]:
    return opened("llava", place)


@pytest.mark.parametrize("name", ["llava", "idefics3", "smolvlm"])
def test_the_engine_decodes_what_transformers_does(name: str, place: Path, llava: Any) -> None:
    target, prompts, images = llava if name == "llava" else opened(name, place)
    found = decode(build_engine(target), prompts, StoppingCriteria(6))
    for ids, prompt, output in zip(prompts, read_prompts(place / "prompts.jsonl", most=6), found, strict=True):
        assert (max(ids) >= LIMIT) == isinstance(prompt.messages[0]["content"], list)
        files = [str(place / part["path"]) for part in prompt.messages[0]["content"] if "path" in part]
        text = images.processor.apply_chat_template(prompt.messages, add_generation_prompt=True)
        inputs = inputs_of(images.processor, [text], [files], "left")
        assert inputs["input_ids"][0].tolist() == [text_id(i) for i in ids]
        own = target.generate(**inputs, do_sample=False, max_new_tokens=6, eos_token_id=-1, pad_token_id=0)
        assert output.tokens == own[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_models_that_place_or_mask_images_otherwise_are_refused(name: str, place: Path) -> None:
    with pytest.raises(PeftlabError, match=r"ForConditionalGeneration is not decoded with images here"):
        opened(name, place)


def test_texts_alone_are_read_as_before(place: Path) -> None:
    """By a model whose embeddings scale their rows, too (Gemma 3)."""
    reference = str(save_vision_language("gemma3", place / "gemma3-text"))
    model, _ = load_model(reference, "AutoModelForImageTextToText")
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected, names = model(input_ids=ids).logits, model.state_dict().keys()
        ImagePrompts(reference).attach(model)
        assert torch.equal(model(input_ids=ids).logits, expected) and model.state_dict().keys() == names


def test_what_a_draft_reads_of_an_image() -> None:
    one, other = 7 * LIMIT + 5, 9 * LIMIT + 5
    ids = [1, one, one, one, one, one, 2, other, other, 3]
    assert draft_places(ids, None) == list(range(10))
    assert draft_places(ids, 2) == [0, 1, 1, 1, 2, 2, 3, 4, 5, 6]
    assert draft_places(ids, 0) == [0, -1, -1, -1, -1, -1, 1, -1, -1, 2]
    assert draft_places([one, one, other, 4], 1) == [0, 0, 1, 2]
    assert [text_id(i) for i in ids] == [1, 5, 5, 5, 5, 5, 2, 5, 5, 3]
    states = torch.arange(10.0)[:, None] ** 2
    pooled = mean_of_parts(states, torch.tensor(draft_places(ids, 2)))[:, 0]
    assert pooled.tolist() == pytest.approx([0, 14 / 3, 20.5, 36, 49, 64, 81])
    assert mean_of_parts(states, torch.tensor(draft_places(ids, 0)))[:, 0].tolist() == [0, 36, 81]


def networks(target: Any, kind: str, read: int | None) -> tuple[Any, Any]:
    """Return a random network of a kind, which reads so many tokens of an image, and its step."""
    make, step = KINDS[kind]
    network = make(target, image_tokens=read)
    return network, step(network, pack=False)


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drafted_is_what_training_computes(llava: Any, kind: str, read: int | None) -> None:
    """Logits of the first drafted token, behind prompts with an image, with two and with none, in one batch."""
    target, prompts, _ = llava
    network, step = networks(target, kind, read)
    drafted = list[torch.Tensor]()

    def observe(rows: Sequence[Any], verified: Verified) -> None:
        if not drafted:
            drafted.extend(verified.draft.logits[:, 0])

    decode(
        build_engine(target, features=network.features),
        prompts,
        StoppingCriteria(3),
        state_drafter(step),
        observe=observe,
    )
    assert len(drafted) == len(prompts)
    for ids, logits in zip(prompts, drafted, strict=True):
        whole = torch.tensor([ids])
        texts = read_texts(TargetWithNetwork(target, network), whole, torch.ones_like(whole))
        images = len(set(ids) - {i for i in ids if i < LIMIT}) and sum(i >= LIMIT for i in ids) // 16
        assert texts.ids.shape[1] == len(ids) - (0 if read is None else (16 - read) * images)
        assert int(texts.ids.max()) < network.vocab_size
        with torch.no_grad():
            if kind == "eagle3":
                own = network.logits(next(unroll(network, texts.features, texts.ids, 1)))[0, -2]
            else:
                anchors = torch.tensor([[texts.ids.shape[1] - 1]])
                own = network.logits(network.drafts(texts.features, texts.ids, anchors))[0, 0, 0]
        torch.testing.assert_close(logits, own, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_the_targets_own(llava: Any, kind: str, read: int | None) -> None:
    """Chains and trees, in batches of rows of different lengths, and in a pool whose rows take the slots of others."""
    target, prompts, _ = llava
    network, step = networks(target, kind, read)
    engine, ending = build_engine(target, features=network.features), StoppingCriteria(8)
    plain = [output.tokens for output in decode(engine, prompts, ending)]
    assert len(set(map(tuple, plain))) > 2
    for width, pool in ((1, None), (3, None), (1, 2)):
        found = decode(engine, prompts, ending, state_drafter(step, width), pool=pool)
        assert [output.tokens for output in found] == plain


@pytest.mark.parametrize(("kind", "read"), [("eagle3", 3), ("dflash", 0)])
def test_sampled_output_follows_the_target(llava: Any, kind: str, read: int) -> None:
    target, (prompt, *_), _ = llava
    sampling, samples = Sampling(temperature=0.8, top_k=3, seed=3), 400
    loss = FeatureLoss(Objective("kl"), 2, 1.0) if kind == "eagle3" else BlockLoss(Objective("kl"), 8, 0.8)
    make, step = KINDS[kind]
    network = trained(target, lambda *of: make(*of, image_tokens=read), loss, 20, [prompt], 12)
    drafter = state_drafter(step(network, pack=False))
    assert isinstance(drafter.drafter, FeatureDrafter if kind == "eagle3" else BlockDrafter)
    engine = build_engine(target, features=network.features)
    outputs = decode(engine, [prompt] * samples, StoppingCriteria(3), drafter, sampling=sampling)
    statistics = acceptance_statistics(outputs)
    assert statistics.accepted > 50 and statistics.acceptance < 1

    @torch.inference_mode()
    def law(prefix: tuple[int, ...], left: int) -> dict[tuple[int, ...], float]:
        if not left:
            return {(): 1.0}
        p = sampling.probabilities(target(input_ids=torch.tensor([[*prompt, *prefix]])).logits[0, -1].double())
        parts = {x: law((*prefix, x), left - 1) for x in p.nonzero()[:, 0].tolist()}
        return {(x, *rest): float(p[x]) * weight for x, part in parts.items() for rest, weight in part.items()}

    expected, counts = law((), 3), Counter(tuple(output.tokens) for output in outputs)
    assert counts.keys() <= expected.keys()
    rare = {outcome for outcome, weight in expected.items() if weight * samples < 5}
    kept = [outcome for outcome in expected if outcome not in rare]
    seen = [counts[outcome] for outcome in kept] + [sum(counts[outcome] for outcome in rare)]
    wanted = [expected[outcome] * samples for outcome in kept] + [sum(expected[o] for o in rare) * samples]
    both = [(a, b) for a, b in zip(seen, wanted, strict=True) if b > 0]
    assert chisquare([a for a, _ in both], [b for _, b in both]).pvalue > 1e-3


# --- The command line.
@pytest.fixture(scope="module")
def run(place: Path, llava: Any) -> Path:
    recipe = {
        "kind": "draft", "target": str(place / "llava"),
        "draft": {"kind": "eagle3", "image_tokens": 2, "vocabulary": 200, "steps": 2, "store_gb": 0.1},
        "data": {"prompts": str(place / "prompts.jsonl"), "held_out": 4, "max_new_tokens": 8},
        "train": {"max_steps": 4, "batch_size": 4, "max_length": 200, "eval_every": 2}, "gamma": 2,
        "output_dir": str(place / "run"),
    }  # fmt: skip
    (place / "draft.yaml").write_text(json.dumps(recipe))
    assert invoke("run", place / "draft.yaml").exit_code == 0
    return place / "run"


def test_a_draft_is_trained_and_benched_on_prompts_with_images(run: Path, place: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    assert results["decoding"]["after"]["lossless"] is True and results["train_examples"] == 15
    assert json.loads((run / "eagle3" / "config.json").read_text())["image_tokens"] == 2
    files = ["--target", place / "llava", "--draft", run / "eagle3", "--prompts", place / "prompts.jsonl"]
    size = ["--max-prompts", 4, "--max-new-tokens", 6, "--repeats", 1, "--gamma", 2]
    done = invoke("draft", "bench", *files, *size, "--drafter", "suffix", "--json", place / "b.json")
    assert done.exit_code == 0, done.output
    found = json.loads((place / "b.json").read_text())["drafters"]
    assert {"draft", "suffix", "suffix+draft"} <= found.keys() and all(each["lossless"] for each in found.values())
    with pytest.raises(PeftlabError, match=r"eagle3 reads 2 tokens of an image \(draft.image_tokens\), and vllm would"):
        invoke("draft", "export", run, "--for", "vllm", "--target", place / "llava", "--out", place / "out")


def test_generate_answers_about_an_image_with_and_without_a_draft(run: Path, place: Path) -> None:
    asked = [
        "generate",
        "--target",
        place / "llava",
        "--image",
        place / "digits" / "4" / "000.png",
        "--prompt",
        "Which?",
    ]
    answers = []
    for more in ([], ["--draft", run], ["--drafter", "lookup"]):
        done = invoke(*asked, "--max-new-tokens", 7, *more, "--json", place / "answer.json")
        assert done.exit_code == 0, done.output
        answers.append(json.loads((place / "answer.json").read_text()))
        assert answers[-1]["text"] in done.stdout
    assert answers[0]["tokens"] == answers[1]["tokens"] == answers[2]["tokens"] and answers[0]["tokens"]
    assert answers[0]["block_efficiency"] is None and answers[1]["block_efficiency"] >= 1
    other = [*asked[:4], place / "digits" / "0" / "000.png", *asked[5:]]
    invoke(*other, "--max-new-tokens", 7, "--json", place / "answer.json")
    assert json.loads((place / "answer.json").read_text())["tokens"] != answers[0]["tokens"], "the image is seen"


@pytest.mark.parametrize(
    ("draft", "data", "message"),
    [
        ({"kind": "medusa"}, {}, "medusa drafts for text alone, and data.prompts has images; eagle3 and dflash"),
        ({"kind": "eagle3", "image_tokens": -1}, {}, "draft.image_tokens"),
        (
            {"kind": "eagle3"},
            {"endpoint": "http://127.0.0.1:9/v1", "endpoint_model": "m"},
            "data.endpoint: not with images",
        ),
        ({"kind": "eagle3"}, {"max_new_tokens": 500}, "longer than 512 tokens"),
    ],
)
def test_what_does_not_go_with_images_is_refused(run: Path, place: Path, draft: Any, data: Any, message: str) -> None:
    values = json.loads((place / "draft.yaml").read_text())
    values |= {"draft": draft, "data": values["data"] | data, "output_dir": str(place / "refused")}
    (place / "refused.yaml").write_text(json.dumps(values))
    with pytest.raises(PeftlabError, match=message):
        invoke("run", place / "refused.yaml")


def test_a_target_of_text_alone_refuses_images(place: Path, llava: Any) -> None:
    images = llava[2]
    asked = Prompt(
        "p", "all", messages=[{"role": "user", "content": [{"type": "image", "path": "x.png"}]}], where="f:1"
    )
    with pytest.raises(PeftlabError, match=r"f:1: a content with a part other than text, and the target reads text"):
        encode(images.processor.tokenizer, asked, True)
    with pytest.raises(PeftlabError, match=r"f:1: .*x.png: no such file"):
        encode(images.processor.tokenizer, asked, True, images)
