"""The keys of ``results.json``, and the reference page made from them.

``python -m peftlab.reporting.result_keys`` writes ``docs/reference/results.md`` into the repository.
"""

from __future__ import annotations

from collections.abc import Mapping

from peftlab.files import write_text
from peftlab.recipe import library

COMMON = {
    "task": "the task, or `draft of TARGET`",
    "method": "how parameters trained",
    "model": "reference of the base model, or of the draft before training",
    "metric": "name of the deciding metric",
    "score": "its value at the best evaluation, on the first split",
    "metrics": "all metrics at the best evaluation, by split",
    "last_metrics": "all metrics at the last evaluation, by split",
    "best_step": "optimiser step of the best evaluation",
    "steps": "optimiser steps of the run",
    "baseline_score": "the deciding metric of the baseline: the majority class, the mean, or the model before training",
    "baseline_metrics": "all metrics of the baseline",
    "trainable_parameters": "parameters that required a gradient",
    "total_parameters": "all parameters, the adapter's included",
    "train_seconds": "wall time of training, evaluations included",
    "examples_per_second": "training examples per second",
    "tokens_per_second": "training tokens per second, without padding",
    "peak_rss_mb": "largest main memory in MiB",
    "peak_gpu_mb": "largest GPU memory in MiB; null without a GPU",
    "cost": "of all training steps, scoring of examples included: `forward_flops`, `backward_flops` (products and "
    "attention; a multiplication and an addition are 2); of the largest step `kept_bytes` (for backward, parameters "
    "apart) and `optimizer_bytes` (gradients and AdamW's averages); `kv_bytes_per_token` of a model that generates; "
    "absent with many processes or `train.compile`",
    "selection": "what `train.sample` chose by a score: `rounds`, `examples`, `scored_examples` (forward passes "
    "that this took) and their `scoring_flops`; absent where no score chooses",
    "lr": "the peak learning rate: `train.lr`, or the method's own",
    "cpu": "the processor: `name`, `features` (instruction sets), `threads`",
    "seed": "`train.seed`",
    "merge": "merged model against adapter: `max_logit_difference`, `argmax_agreement` and `examples`; "
    "only where a merge was verified",
    "latency": "forward pass relative to the base model's: of the `merged` model, and `unmerged`, of base and adapter; "
    "only where the recipe asks for it (`merge: {latency: true}`)",
}
FINETUNE = {
    "padding_share": "share of the tokens in training batches that were padding",
    "classes": "class name to its number of examples by split; empty for regression",
    "dropped_rows": "rows left out because a text or label was missing",
    "left_out": "all rows left out, by reason",
    "by_class": "class name to `precision`, `recall`, `f1` and `support` on the first split; `text/tokens`: by type of "
    "entity (by tag, where tags have none), `text/choice`: by place of the choice; absent for regression",
    "confusion": "examples of that split by [class of the label][class predicted], in the order of `by_class`; "
    "absent where an example has several answers (`text/multilabel`, entities)",
    "points": "regression: [label, prediction] of at most 500 examples of that split",
    "hardest": "the ten examples of that split with the largest loss: `row`, `text`, `text_pair`, `label`, "
    "`predicted`, `probability` (of the label), `loss`",
    "merge_losses": "after training on a base in int8 or nf4: loss on the first evaluation split of the `live` model "
    "and of both merges, `dequantised` and `original`; absent elsewhere",
    "seen_examples": "examples of all training batches",
    "seen_tokens": "their tokens without padding",
    "trained_tokens": "language tasks: the tokens of an epoch that the loss counts: of the answers, or as "
    "`data.train_on` says; absent elsewhere",
    "total_seconds": "wall time of the process's run up to its results, generated answers included",
    "generate": "metric of generated answers to its value (`generate.metrics`, means with a 95 % interval as "
    "`NAME_low`, `NAME_high`; `ended`: share that ended before `max_new_tokens`; `contexts`: how many); absent "
    "elsewhere",
    "generate_before": "the same of the model before training",
    "sample": "what a language model answers to a held-out input, `before` training and `after`; absent elsewhere",
}
DRAFT = {
    "objective": "`objective.name`",
    "train_examples": "training examples",
    "learnt_tokens": "tokens of the target's text in them",
    "kept_share": "share of those tokens that the loss counted (`objective.selective`)",
    "merged_metrics": "acceptance of the merged draft, read from disk",
    "vocabulary": "`tokens` of a reduced vocabulary, and the `ceiling` that it puts on acceptance",
    "acceptance_head": "squared error of the acceptance head on held-out text, and that of a constant",
    "chosen": "how the parts of a draft were found on the target's text. By gates: the `layers` kept, the "
    "`probabilities` that each layer's gate is open, how many are `expected` open, the `price` of one, `steps`. "
    "Pruned: units `kept` `of` how many per layer, and of each of the `rounds` its `steps`, the largest of the "
    "`distances` of each mask from those before it, and whether they were `stable`. Absent elsewhere",
    "held_out": "`acceptance` of each example of the first held-out split, its `tokens`, and a digest of the "
    "`text`: `peftlab report A B` compares runs on the same text in pairs by them",
    "served": "text by `data.endpoint`: the `model` id there, stored `answers`, form of the request -> answers "
    "(`forms`), reason -> answers that were left out (`dropped`), answers with the text of an earlier sample of their "
    "prompt (`repeated`); absent elsewhere",
    "repetition": "of the held-out answers: share of the 8-grams `seen` in the training text, share of the 4-grams "
    "`repeated` within an answer",
    "decoding": "`before` and `after` training: `block_efficiency` (tokens per target step), `tau_without_bonus` "
    "(drafted ones alone), "
    "`accepted`, `acceptance_by_position`, `accepted_runs` (drafted tokens accepted in a step -> steps), "
    "`tokens_per_second`, "
    "`plain_tokens_per_second`, `speed_up`, `speed_up_interval`, `lossless`, `verdict`, `beside` (speed-up of "
    "copying alone, `suffix`, and with the draft, `suffix+draft`), `kernel`, `conditions`, "
    "`time` (shares of target, draft and outside), `gain` (tau, verification C(n), drafting D, the best draft length), "
    "`example` (an output with its drafted tokens, after training); and `gamma`, tokens drafted per target step",
}

_INTRODUCTION = """\
# Results

<!-- Written by `python -m peftlab.reporting.result_keys`; edit the descriptions there. -->

`results.json` in a run directory is one JSON object. NaN and infinite values are written as `NaN` and `Infinity`.
`report.html`, model cards and tables are made from it. A table's own results are the rows of `table.csv`: see
[tables and sweeps](../guide/tables.md).
"""
_OTHERS = """\
## `merge.json`

`peftlab merge` writes one beside the merged weights: the fields of

```{eval-rst}
.. autoclass:: peftlab.checkpoints.merge.report.MergeReport
.. autoclass:: peftlab.checkpoints.merge.report.TensorReport
```

## JSON of each verb

Every verb takes `--json PATH` (`-`: one object on stdout, and everything else goes to stderr) and `--quiet`. The object
is what the function in Python returns: `run`, `resume` and `draft update` give the keys above (a table: `cells` and
`table`; `draft update --prompts`: the fields of `StreamResults`), `validate` the recipe (with `--deep` also `deep`,
with `--show` also `examples`), `eval` {split: {metric: value}}, `predict` `answers`, `classes` and `probabilities`,
`inspect`, `merge` (`report`, `check`), `adapter` and `draft export` the fields of what they return, `generate` one
output (`--chat`: `answers`), and verbs that only write say where as `out`.

Each of `validate`'s `examples` has a `title` and `parts`: `text`, and whether it is `trained`. `deep` has the fields of

```{eval-rst}
.. autoclass:: peftlab.pipelines.checks.deep_check.DeepCheck
   :exclude-members: __init__
.. autoclass:: peftlab.pipelines.checks.deep_check.CheckedData
   :exclude-members: __init__
.. autoclass:: peftlab.pipelines.checks.deep_check.CheckedMethod
   :exclude-members: __init__
.. autoclass:: peftlab.reporting.console.Inspection
   :exclude-members: __init__
```

## `draft bench --json` and `draft plan --json`

```{eval-rst}
.. autoclass:: peftlab.decoding.statistics.BenchmarkResult
   :exclude-members: __init__
.. autoclass:: peftlab.decoding.statistics.DrafterResult
   :exclude-members: __init__
.. autoclass:: peftlab.decoding.statistics.CategoryResult
   :exclude-members: __init__
.. autoclass:: peftlab.decoding.lossy.LossyResult
   :exclude-members: __init__
.. autoclass:: peftlab.decoding.statistics.PoolResult
   :exclude-members: __init__
.. autoclass:: peftlab.decoding.statistics.AcceptanceStatistics
   :exclude-members: __init__
.. autoclass:: peftlab.decoding.benchmark.DraftedText
   :exclude-members: __init__
.. autoclass:: peftlab.decoding.benchmark.Piece
   :exclude-members: __init__
.. autofunction:: peftlab.decoding.planning.plan
   :no-index:
```

Before these keys come the settings: `target`, `draft`, `dtype`, `draft_dtype`, `warnings`, and for `bench` `gamma`,
`width`, `policy`, `weights` and `example`. `weights` has, of `target` and, where it is a model of its own, `draft`, the
`dtype` and how they are `packed` for the products (in 16 bits, by oneDNN, as codes of blocks; an empty list: as the
model has them). `example` is an output with its drafted tokens. In Python,
`peftlab.benchmark` and `peftlab.plan_draft` return them as

```{eval-rst}
.. autoclass:: peftlab.pipelines.drafts.measure_draft.DraftBenchmark
   :exclude-members: __init__
.. autoclass:: peftlab.pipelines.drafts.measure_draft.MeasuredDraftPlan
   :exclude-members: __init__
```
"""


def reference_markdown() -> str:
    """Return the reference page."""
    parts = [
        _INTRODUCTION,
        "## Every run\n",
        _table(COMMON),
        "## `kind: finetune`\n",
        _table(FINETUNE),
        "## `kind: draft`\n",
        _table(DRAFT),
        _OTHERS,
    ]
    return "\n".join(parts)


def _table(keys: Mapping[str, str]) -> str:
    rows = "".join(f"| `{key}` | {text} |\n" for key, text in keys.items())
    return f"| key | meaning |\n| --- | --- |\n{rows}"


if __name__ == "__main__":
    write_text(library.recipes_root().parent / "docs" / "reference" / "results.md", reference_markdown())
