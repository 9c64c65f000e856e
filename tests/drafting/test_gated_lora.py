"""A LoRA that acts on masks alone: the other rows are the target's, and a mask predicts what it was trained to."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import VOCAB, requests, tiny
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from peftlab.checkpoints.adapter import save_adapter
from peftlab.decoding.cache import Block, Engine
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.parallel_drafters import MaskedPassEngine, Masks, OnePassDrafter, ParallelDrafter
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.gated_lora import (
    GatedLoss,
    block_rows,
    check_lora_targets,
    continue_from,
    measure_masks,
    refuse_states,
)
from peftlab.drafting.objectives import Objective
from peftlab.drafting.pard import check_parallel
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.methods.inject import disabled, make_config
from peftlab.methods.lora.layers import Gate, LoraConv1D, LoraLinear, unregister_factors
from tests.gated_models import gated_model

MASKS = Masks(37, 4)


def windowed() -> Any:
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return spread(MistralForCausalLM, config)


def gpt2() -> Any:
    config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return spread(GPT2LMHeadModel, config)


def neox() -> Any:
    config = GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return spread(GPTNeoXForCausalLM, config)


def spread(kind: Any, config: Any) -> Any:
    torch.manual_seed(1)
    return kind(config).eval()


TARGETS = {"llama": lambda: tiny(3), "sliding window": windowed, "gpt2": gpt2, "neox": neox}


def batch() -> dict[str, Tensor]:
    rows = make_dataset(requests())
    return Collate(pad=2)([rows[i] for i in range(len(rows))])


@pytest.mark.parametrize("way", [{"pack": False}, {}, {"flat": False}], ids=["flat", "packed", "transformers"])
@pytest.mark.parametrize("name", TARGETS)
def test_rows_without_the_addition_are_the_targets_bit_for_bit(name: str, way: dict[str, bool]) -> None:
    target = TARGETS[name]()
    tokens, block = torch.tensor([[5, 6, 7, 8, 9, 37, 37, 37]]), Block((0,), 8)
    masks = torch.arange(8)[None] > 4

    def read(engine: Engine, gate: Gate | None = None) -> Tensor:
        if gate is None:
            return engine.forward(engine.new_cache(1, 8), tokens, block).logits
        with gate.over(masks):
            return engine.forward(engine.new_cache(1, 8), tokens, block).logits

    plain = read(build_engine(target, **way))
    found = []
    for std in (0.0, 0.3):
        model, gate = gated_model(target, std)
        engine = build_engine(model, **way)
        assert engine.kind.startswith("flat") == ("flat" not in way), "the flattened step takes a gated LoRA"
        assert torch.equal(read(engine), plain), "no mask, no addition"
        found.append(read(engine, gate))
    assert torch.equal(found[0][:, :5], found[1][:, :5]), "no LoRA reaches the rows of the text"
    assert not torch.allclose(found[0][:, 5:], found[1][:, 5:]) and torch.isfinite(found[1]).all()
    torch.testing.assert_close(found[1][:, :5], plain[:, :5], atol=1e-4, rtol=1e-4)


def appended(target: Any, adapted: Any, text: list[int], masks: list[int]) -> Tensor:
    """Return the logits of masks behind a text, [k, V]: the text read by the target, they by the whole LoRA."""
    with torch.no_grad():
        cache = DynamicCache(config=target.config)
        target(input_ids=torch.tensor([text]), past_key_values=cache)
        return adapted(input_ids=torch.tensor([masks]), past_key_values=cache).logits[0]


def adapted_everywhere(target: Any) -> Any:
    """Return the model of ``gated_model`` whose LoRA acts on all rows."""
    model, _ = gated_model(target, 0.3)
    for leaf in model.modules():
        if isinstance(leaf, LoraLinear | LoraConv1D):
            leaf.lora_gate = None
    return model


@pytest.mark.parametrize("way", [{"pack": False}, {"flat": False}], ids=["flat", "transformers"])
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_drafted_is_what_the_lora_gives_behind_the_targets_own_text(name: str, way: dict[str, bool]) -> None:
    target, seen = TARGETS[name](), []
    (model, gate), whole = gated_model(target, 0.3), adapted_everywhere(target)
    engine = build_engine(model, **way)

    def observe(rows: Any, verified: Any) -> None:
        seen.extend((list(row.tokens), line) for row, line in zip(rows, verified.draft.tokens.tolist(), strict=True))

    prompts = ([5, 6, 7], [8], [9, 10, 11, 12, 13, 14])
    two = ParallelDrafter(MaskedPassEngine(engine, gate), MASKS, shares_cache=True)
    decode(engine, prompts, StoppingCriteria(9), two, policy=partial(Fixed, 4), observe=observe)
    checked = 0
    for text, drafted in seen:
        with torch.no_grad():
            first = int(target(input_ids=torch.tensor([text])).logits[0, -1].argmax())
        wanted = [first, *appended(target, whole, text, MASKS.ids(3)).argmax(-1).tolist()]
        count = sum(token >= 0 for token in drafted)
        assert drafted[:count] == wanted[:count]
        checked += count > 2
    assert checked > 3
    seen.clear()
    one = OnePassDrafter(engine, MASKS, gate=gate)
    decode(engine, prompts, StoppingCriteria(9), one, policy=partial(Fixed, 3), observe=observe)
    checked = 0
    for text, drafted in seen:
        wanted = appended(target, whole, text[:-1], MASKS.ids(3)).argmax(-1).tolist() if len(text) > 1 else []
        count = sum(token >= 0 for token in drafted)
        assert drafted[:count] == wanted[:count], "the masks stood in the place of the token that is now the last"
        checked += count > 2
    assert checked > 3


@pytest.mark.parametrize("passes", [1, 2])
def test_sampled_tokens_follow_the_target(passes: int) -> None:
    target, prompt, sampling = tiny(3), [3, 4], Sampling(temperature=30.0, top_k=3, seed=5)
    model, gate = gated_model(target, 0.3)
    engine, masks, count = build_engine(model, pack=False), Masks(5, 3), 600
    drafter = (
        OnePassDrafter(engine, masks, gate=gate)
        if passes == 1
        else ParallelDrafter(MaskedPassEngine(engine, gate), masks, shares_cache=True)
    )
    given: list[Tensor] = []

    def observe(rows: Any, verified: Any) -> None:
        given.extend([] if verified.draft.probs is None else [verified.draft.probs[:, 0]])

    settings: Any = {"policy": partial(Fixed, 2), "sampling": sampling, "observe": observe}
    outputs = decode(engine, [prompt] * count, StoppingCriteria(3), drafter, **settings)

    def law(text: list[int]) -> Tensor:
        with torch.no_grad():
            return sampling.probabilities(target(input_ids=torch.tensor([text])).logits[0, -1])

    first = law(prompt)
    chosen = first.nonzero()[:, 0].tolist()
    wanted = {(x, y): float(first[x] * q) for x in chosen for y, q in enumerate(law([*prompt, x]).tolist()) if q}
    pairs = Counter((output.tokens[0], output.tokens[1]) for output in outputs)
    assert pairs.keys() <= wanted.keys() and len(wanted) == 9
    squares = sum((pairs[pair] - p * count) ** 2 / (p * count) for pair, p in wanted.items())
    assert squares < 32, "chi-square of 8 degrees of freedom: 1 in 10,000"
    if passes == 2:
        torch.testing.assert_close(given[0][0], first, msg="the first token is drawn from the target's own law")


def by_hand(model: Any, gate: Tensor, leaves: dict[str, Any]) -> None:
    """Let hooks on a plain model add each LoRA where a gate is 1, with ordinary gradients everywhere."""
    for name, leaf in leaves.items():

        def add(module: Any, inputs: Any, output: Tensor, leaf: Any = leaf) -> Tensor:
            low = inputs[0] @ leaf.lora_A.t() @ leaf.lora_B.t() * leaf.scale
            return output + gate[..., None] * low if output.shape[1] == gate.shape[1] else output

        model.get_submodule(name).register_forward_hook(add)


@pytest.mark.parametrize("objective", ["lk", "tvd", "ce"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_additions_on_masks(objective: Any, checkpointing: bool) -> None:
    inputs, target = batch(), tiny(3)
    model, gate = gated_model(target, 0.1)
    loss = GatedLoss(Objective(objective), gate, lambda: MASKS, [3])
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    torch.manual_seed(4)
    value = loss(model, inputs)
    value.backward()
    mine = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    torch.manual_seed(4)
    offsets = [int(torch.randint(max(1, min(3, n - 1)), ())) for n in (inputs["weights"] > 0).sum(1).tolist()]
    rows = block_rows(inputs["weights"], 3, offsets)
    shown = torch.cat((torch.zeros_like(inputs["input_ids"]), (rows.depth > 0).long()), 1).float()
    by_hand(target, shown, {name: leaf for name, leaf in model.named_modules() if isinstance(leaf, LoraLinear)})
    torch.manual_seed(4)
    wanted = GatedLoss(Objective(objective), Gate(), lambda: MASKS, [3])(target, inputs)
    torch.testing.assert_close(value, wanted)
    wanted.backward()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=1e-4, rtol=1e-3)


def test_training_raises_the_acceptance_of_every_mask_and_leaves_the_target() -> None:
    target, rows = tiny(3), make_dataset(requests(16, response=10))
    model, gate = gated_model(target, 0.0, r=8, lora_alpha=32)
    inputs = Collate(pad=2)([rows[i] for i in range(len(rows))])
    loss = GatedLoss(Objective("lk"), gate, lambda: MASKS, [2, 4])
    assert [loss.at_step(step, 30) for step in (0, 14, 15, 29)] == [" blocks of 2"] * 2 + [" blocks of 4"] * 2
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    before = [depth.rates()["acceptance"] for depth in measure_masks(model, gate, rows, MASKS)]
    assert torch.equal(state, torch.random.get_rng_state()), "a score must not change what training draws"
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        (loss(model, inputs) / 100).backward()
        optimizer.step()
    after = [depth.rates()["acceptance"] for depth in measure_masks(model, gate, rows, MASKS)]
    assert all(new > old + 0.05 for new, old in zip(after, before, strict=True)), (before, after)
    gate.show(None)
    ids = inputs["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, target(input_ids=ids).logits)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert unregister_factors(model) == count
    assert model.state_dict().keys() == target.state_dict().keys()
    with disabled(model):
        assert torch.equal(model(input_ids=ids).logits, target(input_ids=ids).logits)


def test_blocks_follow_one_another_and_every_mask_has_its_predecessors() -> None:
    weights = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0, 0, 0], [0] * 8 + [1, 0]])
    rows = block_rows(weights, 3, [1, 0, 0])
    assert rows.depth.tolist() == [[1, 2, 1, 2], [1, 2, 0, 0], [0] * 4]
    assert rows.place.tolist() == [[4, 5, 7, 8], [1, 2, 0, 0], [0] * 4]
    covered = [block_rows(weights[:1], 3, [offset]) for offset in range(3)]
    pairs = {(d, p) for rows in covered for d, p in zip(rows.depth[0].tolist(), rows.place[0].tolist(), strict=True)}
    assert pairs == {(d, p) for d in (1, 2) for p in range(2 + d, 9)}


def test_noise_is_drawn_once_below_the_vocabulary() -> None:
    noise = Masks(VOCAB, 4, noise=True)
    assert noise.ids(3) == noise.ids(3) and len(set(noise.ids(30))) > 5 and max(noise.ids(500)) == VOCAB - 1
    assert Masks(7, 4).ids(3) == [7, 7, 7]
    model, gate = gated_model(tiny(3), 0.1)
    torch.manual_seed(0)
    values = [GatedLoss(Objective("tvd"), gate, lambda: noise, [4])(model, batch()).item() for _ in range(2)]
    assert 0 < values[0] != values[1], "other tokens in every step"


@pytest.mark.parametrize(
    ("target", "method", "message"),
    [
        ("llama", {"target_modules": ["embed_tokens"]}, r"model.embed_tokens \(Embedding\) cannot take an addition"),
        ("llama", {"bias": "all", "target_modules": ["q_proj"]}, "would train"),
        ("llama", {"modules_to_save": ["lm_head"]}, r"would train lm_head.weight itself"),
    ],
)
def test_what_would_change_the_text_is_refused(target: str, method: dict[str, Any], message: str) -> None:
    if method.get("bias"):
        model, message = gpt2(), "would train transformer"
        method = {"bias": "all"}
    else:
        model = TARGETS[target]()
    with pytest.raises(PeftlabError, match=message):
        check_lora_targets(model, make_config("lora", **method))


def test_targets_without_rows_of_their_own_for_masks_are_refused() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2))
    with pytest.raises(PeftlabError, match=r"draft\.kind gated_lora: BloomForCausalLM"):
        check_parallel(bloom, "gated_lora")
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(PeftlabError, match="MambaForCausalLM keeps a state that each token changes"):
        refuse_states(mamba)


def test_a_module_that_sees_other_rows_is_named() -> None:
    model, gate = gated_model(tiny(3), 0.1)
    with gate.over(torch.ones(1, 5, dtype=torch.bool)), pytest.raises(PeftlabError, match="7 rows of a batch of 5"):
        model(input_ids=torch.arange(7)[None])


def test_an_update_begins_with_the_values_of_the_stored_lora(tmp_path: Path) -> None:
    trained, new = gated_model(tiny(3), 0.1)[0], gated_model(tiny(3), 0.0, seed=1)[0]
    save_adapter(trained, tmp_path)
    continue_from(new, str(tmp_path))
    mine = {name: p for name, p in new.named_parameters() if p.requires_grad}
    assert mine and all(torch.equal(p, trained.get_parameter(name)) for name, p in mine.items())
    with pytest.raises(PeftlabError, match=r"its method has lora_alpha 16.0, this run's 99.0"):
        continue_from(gated_model(tiny(3), 0.0, lora_alpha=99)[0], str(tmp_path))


def test_the_file_says_what_masks_read(tmp_path: Path) -> None:
    from peftlab.drafting.gated_lora import read_masks_of_gate, write_masks_of_gate

    for masks in (Masks(7, 4), Masks(40, 2, noise=True)):
        write_masks_of_gate(tmp_path, masks)
        assert read_masks_of_gate(tmp_path, 40) == masks
    write_masks_of_gate(tmp_path, Masks(40, 4))
    with pytest.raises(PeftlabError, match=r"gated_lora.json: mask_token 40 and length 4 are not those of 40 tokens"):
        read_masks_of_gate(tmp_path, 40)
    (tmp_path / "gated_lora.json").write_text(json.dumps({"mask_token": 3, "length": 4}))
    with pytest.raises(PeftlabError, match="noise"):
        read_masks_of_gate(tmp_path, 40)
