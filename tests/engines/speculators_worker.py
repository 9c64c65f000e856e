"""Jobs for speculators, run by the interpreter of an environment of its own: a list of them as JSON on stdin.

Each job loads the draft in ``directory`` with speculators' class of its type, computes logits from the tensors in the
file ``inputs`` and writes them as ``logits`` to the file ``out``. A job with ``options`` first writes that draft as
speculators' trainer does, by its defaults and these options; weights that are not the target's are random.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.train.cli import build_draft_model, parse_vocab_mappings
from speculators.train.config.schema import TrainConfig


def write(directory, options):
    """Write a draft as the trainer does before its first step, but with random weights, norms included."""
    arguments = Namespace(**TrainConfig.from_flat({"draft_attn_impl": "sdpa", **options}).flatten())
    d2t, t2d, size = parse_vocab_mappings(arguments)
    model = build_draft_model(arguments, SpeculatorModel.registry[arguments.speculator_type], t2d, d2t, size)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("embed_tokens.", "lm_head.", "verifier_")):
                continue
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)


def load(directory):
    """Return the draft in a directory, by its type's own class, in float32."""
    weights = Path(directory, "model.safetensors")
    kind = json.loads(Path(directory, "config.json").read_text())["speculators_model_type"]
    model_class = SpeculatorModel.registry[kind]
    config = model_class.config_class.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "sdpa"  # the default, flex attention, would be compiled
    model = model_class.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    # Embeddings that a file leaves to the target would stay uninitialised: speculators 0.9.0 looks for NaN, with which
    # transformers 5 no longer lets them begin.
    if kind != "mtp":  # which fills them with NaN itself, has loaded them, and dropped what it does not need
        model._load_verifier_weights(overwrite_embed_tokens="embed_tokens.weight" not in load_file(weights))
    return kind, model


def eagle3(model, inputs):
    """Return the logits of each step of the training-time test, [steps, n - 1, V_d].

    Args:
        inputs: ``features`` [n, F], ``ids`` [n], ``steps`` [steps].
    """
    found = []
    hook = model.lm_head.register_forward_hook(lambda module, read, logits: found.append(logits))
    features, ids = inputs["features"][None, :-1], inputs["ids"][None, 1:]  # a row reads a state and the token after it
    model(features, ids, torch.zeros_like(ids), ttt_steps=len(inputs["steps"]))
    hook.remove()
    return torch.cat(found)


def mtp(model, inputs):
    """Return the logits of each step, [steps, rows, V].

    Args:
        inputs: ``features`` [n, H], ``ids`` [n].
    """
    found, *_ = model(inputs["ids"][None], inputs["features"][None])
    return torch.cat(found)


def block(model, inputs):
    """Return the logits of blocks, and beside them what a confidence head says, [anchors, B, V_d or V_d + 1].

    Args:
        inputs: ``features`` [n, F], ``ids`` [n], ``anchors`` [anchors], rising, at least a block from the end.
    """
    found = []

    def capture(logits, targets, *rest, **settings):
        found.append(logits)
        if model.config.speculators_model_type == "dspark" and rest[0] is not None:
            found.append(rest[0][..., None])
        return torch.zeros(()), {}

    sys.modules[type(model).__module__].compute_metrics = capture  # what the class calls with its logits
    features, ids, anchors = inputs["features"][None], inputs["ids"][None], inputs["anchors"]
    mask = torch.zeros_like(ids)
    mask[:, anchors] = 1
    last = torch.zeros(*ids.shape, model.hidden_size)
    model(features, ids, mask, last, torch.zeros_like(ids), max_anchors=len(anchors))
    return torch.cat(found, -1).view(len(anchors), model.block_size, -1)


LOGITS = {
    "eagle3": eagle3,
    "mtp": mtp,
    "dflash": block,
    "dspark": block,
}  # type -> function of a model and tensors by name to logits

for job in json.load(sys.stdin):
    if "options" in job:
        write(job["directory"], job["options"])
    kind, model = load(job["directory"])
    with torch.no_grad():
        save_file({"logits": LOGITS[kind](model, load_file(job["inputs"])).contiguous()}, job["out"])
