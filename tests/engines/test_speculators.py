"""Drafts in speculators' own classes: what is exported here computes the same logits there, and what it writes, here.

A further type is a function in ``LOGITS`` of ``speculators_worker.py``, from a loaded model and tensors by name to
logits, and here a function to the same logits from a directory and the same tensors, with a test like
``test_an_exported_draft`` (the fixture ``speculators`` runs the worker) and a case of ``WRITTEN``.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from peftlab.drafting.block import DFlash, confidence_inputs, predicted_places, read_dflash, write_dflash
from peftlab.drafting.block_files import BlockShape
from peftlab.drafting.eagle import Eagle3, read_eagle, write_eagle
from peftlab.drafting.export import export_draft
from peftlab.drafting.mtp import find_own_layer, read_own_layer, write_mtp
from peftlab.drafting.state_network import shape_for, unroll
from peftlab.drafting.target import head_weight, input_embedding
from tests.engines.conftest import SPECULATORS
from tests.mtp_targets import VOCAB, WIDTH, save_target, stored_tensors

pytestmark = pytest.mark.engines
FEATURES, LENGTH, STEPS = (1, 3, 4), 12, 3
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EXPORTED: dict[str, dict[str, Any]] = {"no flag": {}, **{name: {name: True} for name in FLAGS}, "few tokens": {}}
WRITTEN: dict[str, dict[str, Any]] = {
    "eagle3 by its defaults": {},
    "eagle3 without flags": {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False},
    "eagle3 with fc_norm": {"norm_before_fc": False, "fc_norm": True},
    "eagle3 of few tokens": {"draft_vocab_size": 100},
    "eagle3 with a layer of a Qwen3": {"draft_arch": "qwen3"},
}
SPARK: dict[str, Any] = {"from_anchor": True, "markov_rank": 8, "confidence": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash of few tokens": {},
    "dflash with a window": {"window": 2048},  # longer than the text: speculators counts another row of a window
    "dspark, vanilla Markov head": SPARK,
    "dspark, gated Markov head": SPARK | {"markov_head": "gated"},
    "dspark, rnn Markov head": SPARK | {"markov_head": "rnn"},
    "dspark of few tokens": SPARK | {"markov_head": "gated"},
    "dspark whose confidence head reads no token": SPARK | {"confidence_sees_token": False},
    "dspark that does not draft from its anchor": SPARK | {"from_anchor": False},
}
BLOCKS_WRITTEN: dict[str, dict[str, Any]] = {
    "dflash by its defaults": {},
    "dflash with full attention": {"full_attention_indices": [0, 1]},
    "dflash of few tokens": {"draft_vocab_size": 100},
    "dspark by its defaults": {"speculator_type": "dspark"},
    "dspark with a gated Markov head": {"speculator_type": "dspark", "markov_rank": 8, "markov_head_type": "gated"},
    "dspark with an rnn Markov head": {"speculator_type": "dspark", "markov_rank": 8, "markov_head_type": "rnn"},
    "dspark of few tokens": {"speculator_type": "dspark", "draft_vocab_size": 100},
    "dspark without a confidence head": {"speculator_type": "dspark", "enable_confidence_head": False},
    "dspark that does not draft from its anchor": {"speculator_type": "dspark", "sample_from_anchor": False},
}


@pytest.fixture(scope="module")
def inputs(target: Path) -> dict[str, Tensor]:
    """States and tokens of a text that means nothing."""
    config = transformers.AutoConfig.from_pretrained(target)
    g = torch.Generator().manual_seed(1)
    return {
        "features": torch.randn(LENGTH, len(FEATURES) * config.hidden_size, generator=g),
        "ids": torch.randint(3, config.vocab_size, (LENGTH,), generator=g),
        "steps": torch.arange(STEPS),
        "anchors": torch.tensor([0, 3, 5]),
    }


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    """The target."""
    return transformers.AutoModelForCausalLM.from_pretrained(target)


@torch.no_grad()
def eagle3_logits(directory: Path, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of each step of the training-time test as peftlab computes them, [steps, n - 1, V_d]."""
    network = read_eagle(directory, input_embedding(model))
    states = unroll(network, inputs["features"][None], inputs["ids"][None], STEPS)
    return torch.cat([network.logits(rows)[:, :-1] for rows in states])


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Assert that the logits of each step are equal, up to the rows whose token is beyond the text."""
    assert found.shape == expected.shape and expected.std() > 0.3
    for step in range(STEPS):
        n = LENGTH - 1 - step
        torch.testing.assert_close(found[step, :n], expected[step, :n], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def exported(
    speculators: Any, target: Path, model: Any, inputs: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Tensor, Tensor]]:
    """The logits of each draft of ``EXPORTED``, in speculators and here."""
    root = tmp_path_factory.mktemp("exported")
    jobs, ours = [], {}
    for name, flags in EXPORTED.items():
        torch.manual_seed(0)
        tokens = torch.arange(3, model.config.vocab_size, 3) if name == "few tokens" else None
        head = head_weight(model) if tokens is None else head_weight(model)[tokens]
        shape = replace(shape_for(model.config, FEATURES), **flags)
        network = Eagle3(shape, input_embedding(model), head, tokens)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5)
        (root / name).mkdir()
        write_eagle(network, root / name, target=str(target), architecture="LlamaForCausalLM", tokens=3)
        export_draft(root / name, root / "speculators" / name, "speculators", str(target))
        ours[name] = eagle3_logits(root / name, model, inputs)
        jobs.append({"directory": str(root / "speculators" / name)})
    return {name: (there, ours[name]) for name, there in zip(EXPORTED, speculators(jobs, inputs), strict=True)}


@pytest.mark.shows("speculators", "draft: eagle3, {name}", "peftlab's logits within 1e-5")
@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_draft(name: str, exported: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert_close(*exported[name])
    if name in FLAGS:
        assert (exported[name][0] - exported["no flag"][0]).abs().max() > 0.1, "the flag changes what is computed"


@pytest.fixture(scope="module")
def written(
    speculators: Any, target: Path, model: Any, inputs: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Tensor, Tensor]]:
    """The logits of each draft of ``WRITTEN``, here and in speculators."""
    root = tmp_path_factory.mktemp("written")
    torch.save(dict.fromkeys(range(3, model.config.vocab_size, 3), 1), root / "token_freq.pt")
    common = {"speculator_type": "eagle3", "verifier_name_or_path": str(target), "target_layer_ids": list(FEATURES)}
    common |= {"token_freq_path": str(root / "token_freq.pt"), "data_path": str(root)}
    jobs = [{"directory": str(root / name), "options": common | options} for name, options in WRITTEN.items()]
    there = dict(zip(WRITTEN, speculators(jobs, inputs), strict=True))
    config = json.loads((root / "eagle3 by its defaults" / "config.json").read_text())
    assert [name for name in FLAGS if config[name]] == ["norm_before_residual", "norm_before_fc", "norm_output"]
    return {name: (eagle3_logits(root / name, model, inputs), there[name]) for name in WRITTEN}


@pytest.mark.shows("speculators", "written by its trainer: {name}", "read here: its logits within 1e-5")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_draft_that_speculators_wrote(name: str, written: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert_close(*written[name])


QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, Any]]:
    """Targets with an MTP layer, that layer with other values as a run writes it, and the same as a network."""
    found = {}
    for name in QWEN:
        root = tmp_path_factory.mktemp(name)
        place = save_target(name, root / "target")
        model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
        network, _ = read_own_layer(find_own_layer(str(place), model.config, "draft.from"), model)
        with torch.no_grad():
            for parameter in network.mtp_layers.parameters():
                parameter.mul_(1.25)
        (root / "mtp").mkdir()
        write_mtp(network, root / "mtp", target=str(place), architecture=type(model).__name__, tokens=STEPS)
        found[name] = place, root / "mtp", network
    return found


@pytest.mark.shows("speculators", "draft: {{kind: mtp, from: target}}, {name}", "peftlab's logits within 1e-4")
@pytest.mark.parametrize("name", QWEN)
def test_a_tuned_mtp_layer(name: str, speculators: Any, tuned: dict[str, tuple[Path, Path, Any]]) -> None:
    """The first step: the later ones of its trainer attend to the rows of their own step alone."""
    _, draft, network = tuned[name]
    g = torch.Generator().manual_seed(1)
    inputs = {
        "features": torch.randn(LENGTH, WIDTH, generator=g),
        "ids": torch.randint(3, VOCAB, (LENGTH,), generator=g),
    }
    (there,) = speculators([{"directory": str(draft)}], inputs)
    with torch.no_grad():
        (first,) = unroll(network, inputs["features"][None], inputs["ids"][None], 1)
        here = network.logits(first)[0, : there.shape[1]]
    assert here.std() > 0.3
    torch.testing.assert_close(there[0], here, atol=1e-4, rtol=1e-4)


@pytest.mark.shows("speculators", "draft export --for stitched, {name}", "stitch-mtp writes the same tensors")
@pytest.mark.parametrize("name", QWEN)
def test_its_stitched_target_is_ours(
    name: str, speculators: Any, tuned: dict[str, tuple[Path, Path, Any]], tmp_path: Path
) -> None:
    place, draft, _ = tuned[name]
    export_draft(draft, tmp_path / "ours", "stitched", str(place))
    export_draft(draft, tmp_path / "mtp", "speculators", str(place))
    stitch = [SPECULATORS.with_name("speculators"), "stitch-mtp", tmp_path / "mtp", place]
    command = [*stitch, "--output-path", tmp_path / "theirs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = stored_tensors(tmp_path / "ours"), stored_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(torch.equal(theirs[key], tensor) for key, tensor in ours.items())


@torch.no_grad()
def block_logits(directory: Path, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of the tokens that blocks draft, and of a confidence head, [anchors, P, V_d or V_d + 1]."""
    network = read_dflash(directory, input_embedding(model), head_weight(model))
    features, ids, anchors = (inputs[name][None] for name in ("features", "ids", "anchors"))
    places, _ = predicted_places(anchors, torch.ones_like(ids, dtype=torch.bool), network.shape.length)
    before = ids[0, places]
    scored = network.scored(network.drafts(features, ids, anchors), before)
    logits = (scored @ network.score_weight.T)[0]
    if not network.shape.confidence:
        return logits
    odds = network.confidence_head(confidence_inputs(network, scored.flatten(0, 2), before.flatten()))
    return torch.cat((logits, odds.view(*logits.shape[:2], 1)), -1)


def assert_blocks_close(ours: Tensor, theirs: Tensor) -> None:
    """Assert that logits are equal; the row of an anchor that drafts nothing is left out."""
    assert ours.std() > 0.1 and theirs.shape[1] - ours.shape[1] in (0, 1)
    torch.testing.assert_close(ours, theirs[:, -ours.shape[1] :], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def exported_blocks(
    speculators: Any, target: Path, model: Any, inputs: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Tensor, Tensor]]:
    """The logits of each draft of ``BLOCKS``, here and in speculators."""
    root = tmp_path_factory.mktemp("blocks")
    jobs, ours = [], []
    for name, sizes in BLOCKS.items():
        torch.manual_seed(0)
        tokens = torch.arange(3, model.config.vocab_size, 3) if "few tokens" in name else None
        shape = asdict(shape_for(model.config, FEATURES)) | {"head_norms": True, "layers": 2, "block_size": 5}
        head = head_weight(model) if tokens is None else head_weight(model)[tokens]
        network = DFlash(BlockShape(**shape | {"mask_token": 2} | sizes), input_embedding(model), head, tokens)
        with torch.no_grad():
            for key, parameter in network.named_parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5)
                elif key.startswith("markov_head."):
                    parameter.normal_(0, 0.5)
        (root / name).mkdir()
        write_dflash(network, root / name, target=str(target), architecture="LlamaForCausalLM")
        export_draft(root / name, root / "exported" / name, "speculators", str(target))
        ours.append(block_logits(root / name, model, inputs))
        jobs.append({"directory": str(root / "exported" / name)})
    return dict(zip(BLOCKS, zip(ours, speculators(jobs, inputs), strict=True), strict=True))


@pytest.mark.shows("speculators", "draft: {name}", "peftlab's logits within 1e-5")
@pytest.mark.parametrize("name", BLOCKS)
def test_an_exported_block_draft(name: str, exported_blocks: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert_blocks_close(*exported_blocks[name])


@pytest.fixture(scope="module")
def written_blocks(
    speculators: Any, target: Path, model: Any, inputs: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Tensor, Tensor]]:
    """The logits of each draft of ``BLOCKS_WRITTEN``, here and in speculators."""
    root = tmp_path_factory.mktemp("written_blocks")
    torch.save(dict.fromkeys(range(3, model.config.vocab_size, 3), 1), root / "token_freq.pt")
    common = {"speculator_type": "dflash", "verifier_name_or_path": str(target), "target_layer_ids": list(FEATURES)}
    common |= {"token_freq_path": str(root / "token_freq.pt"), "data_path": str(root)}
    common |= {"mask_token_id": 2, "block_size": 5, "num_layers": 2}
    jobs = [{"directory": str(root / name), "options": common | options} for name, options in BLOCKS_WRITTEN.items()]
    there = speculators(jobs, inputs)
    return {
        name: (block_logits(root / name, model, inputs), logits)
        for name, logits in zip(BLOCKS_WRITTEN, there, strict=True)
    }


@pytest.mark.shows("speculators", "written by its trainer: {name}", "read here: its logits within 1e-5")
@pytest.mark.parametrize("name", BLOCKS_WRITTEN)
def test_a_block_draft_that_speculators_wrote(name: str, written_blocks: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert_blocks_close(*written_blocks[name])
