"""The systems of ``docs/reference/decoding.md``: what each is called, the command that runs it, and its test.

A row is one line. In a command ``{NAME}`` is a draft of ``DRAFTS``. A measured row is a ``draft bench``; the options that all
of them share are added by ``measure_systems``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """One row.

    Attributes:
        name: with its paper. command: after ``peftlab``. test: ``FILE::NAME`` below ``tests``.
        drafter: of the result whose figures count; empty: the first one.
    """

    name: str
    command: str
    test: str
    drafter: str = ""

    @property
    def measured(self) -> bool:
        """Whether it is a benchmark that can be run here."""
        return self.command.startswith("draft bench") and "TARGET" not in self.command


_GATE = "decoding/test_lossless_gate.py::test_every_drafter"
_POLICIES = "decoding/test_lossless_gate.py::test_every_policy"
_TREES = "decoding/test_sampled_trees.py"
_RELAXED = "decoding/test_image_tokens.py::test_the_law_of_the_emitted_token_is_that_of_the_code"
_IMAGES = "drafting/test_image_drafts.py::test_greedy_output_is_the_targets_own"
_LAWS = "decoding/test_sampled_decoding.py::test_follows_the_target"

_KEYS = {
    "model": "'draft={kind: model, truncate: {layers: [0, 1, 2, 29]}, vocabulary: 8192}' "
    "method=full acceptance_head=true",
    "exits": "'draft={kind: early_exit, exits: [6, 12], scale: 0.2, curriculum: rotational}' "
    "'method={name: lora, r: 16, target_modules: all-linear}'",
    "kangaroo": "'draft={kind: model, truncate: {layers: [0, 1, 29]}}' method=full 'train.layers={from: 2}'",
    "medusa": "'draft={kind: medusa, heads: 3, shared_head: true, vocabulary: 8192}'",
    "markov": "'draft={kind: medusa, heads: 3, shared_head: true, vocabulary: 8192, markov: 64}'",
    "hydra": "'draft={kind: hydra, heads: 3, shared_head: true, vocabulary: 8192}'",
    "mtp": "'draft={kind: mtp}'",
    "pard": "'draft={kind: pard, truncate: {layers: [0, 1, 2, 29]}, vocabulary: 8192}' method=full",
    "gated": "'draft={kind: gated_lora}' 'method={name: lora, r: 64, lora_alpha: 128, "
    "target_modules: all-linear}' objective.name=lk",
    "eagle1": "'draft={kind: eagle3, features: [30], steps: 1, regression: 10}'",
    "eagle3": "'draft={kind: eagle3, steps: 3, store_gb: 1}'",
    "eagle31": "'draft={kind: eagle3, steps: 3, store_gb: 1, norm_before_fc: true, norm_before_residual: true, "
    "norm_output: true}'",
}
DRAFTS = {name: f"run draft/quickstart train.epochs=3 {keys}" for name, keys in _KEYS.items()}
DRAFTS["dflash"] = "run draft/quickstart"  # the recipe as it is
DRAFTS["dspark"] = "run draft/quickstart 'draft={kind: dflash, markov: 64, confidence: true}'"
"""Name -> the command that trains it; ``output_dir`` is added."""

SYSTEMS = (
    System("Prompt lookup", "draft bench --drafter lookup", _GATE),
    System("SAM-Decoding: suffix automaton (2411.10666)", "draft bench --drafter suffix", _GATE),
    System("Token Recycling", "draft bench --drafter recycling --gamma 8", _GATE),
    System("n-grams: uniform (2211.17192)", "draft bench --drafter ngram:0 --temperature 1", _LAWS),
    System("n-grams: unigram", "draft bench --drafter ngram:1 --temperature 1", _LAWS),
    System("n-grams: bigram", "draft bench --drafter ngram:2 --temperature 1", _LAWS),
    System("Draft model, greedy (2211.17192)", "draft bench --draft {model} --gamma 2", _GATE),
    System("Block verification (2403.10444)", "draft bench --draft {model} --gamma 2 --temperature 1", "decoding/test_verify.py::test_a_block_follows_the_target_exactly_and_accepts_no_less"),
    System("Token by token, in place of blocks (2211.17192)", "draft bench --draft {model} --gamma 2 --temperature 1 --verify tokens", "decoding/test_verify.py::test_a_chain_follows_the_target_exactly"),
    System("RSD-C: fixed branching (2402.14160)", "draft bench --draft {model} --tree rsd_c:2 --gamma 4 --temperature 1 --verify tokens", "decoding/test_sampled_trees.py::test_a_tree_follows_the_target_exactly"),
    System("RSD-S: a stochastic beam (2402.14160)", "draft bench --draft {model} --tree rsd_s:2 --gamma 4 --temperature 1 --verify tokens", "decoding/test_sampled_trees.py::test_a_stochastic_beam_follows_the_target_exactly"),
    System("SpecInfer: multi-round (2305.09781)", "draft bench --draft {model} --tree specinfer:2 --gamma 4 --temperature 1 --verify tokens", "decoding/test_sampled_trees.py::test_chains_with_shared_beginnings"),
    System("SpecTr: K-SEQ (2310.15141)", "draft bench --draft {model} --tree specinfer:2 --gamma 4 --temperature 1 --verify kseq", "decoding/test_sampled_trees.py::test_several_drafts_follow_the_target_exactly"),
    System("Traversal verification (2505.12398)", "draft bench --draft {model} --tree rsd_s:2 --gamma 4 --temperature 1 --verify traversal", "decoding/test_sampled_trees.py::test_whole_paths_accept_more_than_token_by_token"),
    System("SAM-Decoding with a draft, as RASD (2503.03434)", "draft bench --draft {model} --gamma 4", "decoding/test_suffix.py::test_a_fused_tree_follows_the_target_exactly", "suffix+draft"),
    System("Early exit, not trained", "draft bench --draft exit:6 --gamma 2", "decoding/test_self_speculation.py::test_an_exit_is_lossless"),
    System("LayerSkip (2404.16710)", "draft bench --target {exits} --draft exit:6 --gamma 2", "drafting/test_layerskip.py::test_a_run_with_every_schedule_resumes_exactly"),
    System("DEL: exit and length of each round (2504.05598)", "draft bench --draft del --gamma 4", "decoding/test_chosen_exit.py::test_the_output_is_the_targets_own"),
    System("SWIFT: skipped sublayers (2410.06916)", "draft bench --draft swift --gamma 8", "decoding/test_swift.py::test_the_commands_draft_with_the_targets_own_layers"),
    System("Kangaroo (2404.18911)", "draft bench --draft {kangaroo} --gamma 6 --policy confidence:0.6", "drafting/test_shared_layers.py::test_it_drafts_what_the_whole_draft_drafts"),
    System("Medusa, chain (2401.10774)", "draft bench --draft {medusa} --width 1 --gamma 3", _GATE),
    System("Medusa, tree of measured rates", "draft bench --draft {medusa} --gamma 6", "decoding/test_trees_and_free_drafters.py::test_a_tree_of_measured_rates"),
    System("Medusa with a Markov bias (DSpark)", "draft bench --draft {markov} --gamma 6", "drafting/test_markov_heads.py::test_heads_that_see_the_token_before_are_accepted_more_often"),
    System("Hydra (2402.05109)", "draft bench --draft {hydra} --gamma 6", "drafting/test_hydra.py::test_they_see_what_was_drafted_and_are_accepted_more_often_than_heads_that_do_not"),
    System("FastMTP (2509.18362)", "draft bench --draft {mtp} --gamma 3", "drafting/test_mtp.py::test_a_step_of_training_is_a_drafted_token"),
    System("PARD: all tokens in one pass (2504.18583)", "draft bench --draft {pard} --gamma 4", "drafting/test_pard.py::test_a_row_is_what_the_model_computes_with_masks_appended"),
    System("Uno: a LoRA for masks, two passes (2609.04010)", "draft bench --draft {gated} --gamma 4", "drafting/test_gated_lora.py::test_what_is_drafted_is_what_the_lora_gives_behind_the_targets_own_text"),
    System("A LoRA for masks in the verification pass (2507.11851)", "draft bench --draft {gated} --drafter one_pass --gamma 2", "drafting/test_gated_lora.py::test_what_is_drafted_is_what_the_lora_gives_behind_the_targets_own_text", "one_pass"),
    System("EAGLE-1, chain (2401.15077)", "draft bench --draft {eagle1} --gamma 2", "drafting/test_eagle3.py::test_regression_brings_the_state_nearer"),
    System("EAGLE-3, chain (2503.01840)", "draft bench --draft {eagle3} --gamma 2", "drafting/test_eagle3.py::test_a_step_of_training_is_a_drafted_token"),
    System("EAGLE-3, tree of EAGLE-2 (2406.16858)", "draft bench --draft {eagle3} --width 4 --gamma 8", "decoding/test_feature_trees.py::test_the_most_probable_nodes_are_drafted"),
    System("DFlash: a block in one pass (2602.06036)", "draft bench --draft {dflash} --gamma 4", "drafting/test_block.py::test_a_drafted_block_is_one_of_training"),
    System("DSpark: a block with a Markov head (2607.05147)", "draft bench --draft {dspark} --gamma 4", "drafting/test_block.py::test_a_token_drafted_after_another_is_one_of_training"),
    System("DSpark, ended by its confidence head", "draft bench --draft {dspark} --gamma 8 --policy head:0.7", "drafting/test_kinds_end_to_end.py::test_a_confidence_head_ends_drafts"),
    System("EAGLE-3.1, chain (2605.09992)", "draft bench --draft {eagle31} --gamma 2", "drafting/test_eagle31.py::test_a_file_is_decoded_and_trained_as_the_formulas_say"),
    System("A target's own MTP layer, tuned", "draft bench --target TARGET --prompts FILE.jsonl --draft DRAFT", "drafting/test_own_mtp.py::test_a_step_of_training_is_a_drafted_token"),
    System("EAGLE-3 and copies in one tree", "draft bench --draft {eagle3} --gamma 4", "decoding/test_suffix.py::test_a_fused_tree_follows_the_target_exactly", "suffix+draft"),
    System("PEARL: draft and target at once (2408.11850)", "draft bench --draft {model} --drafter pearl --gamma 2", "decoding/test_model_drafters.py::test_greedy_output_is_the_plain_one", "pearl"),
    System("A draft that sees 4 first and 64 last tokens (LongSpec, 2502.17421)", "draft bench --draft {model} --gamma 2 --draft-window 4:64", "decoding/test_model_drafters.py::test_the_output_is_the_targets_own"),
    System("A draft in bf16", "draft bench --draft {model} --gamma 2 --draft-dtype bf16", "decoding/test_lossless_gate.py::test_a_rounded_draft_leaves_the_output_alone"),
    System("Length by confidence", "draft bench --draft {model} --gamma 4 --policy confidence:0.4", _POLICIES),
    System("Length by the last step, as transformers", "draft bench --draft {model} --gamma 4 --policy heuristic", _POLICIES),
    System("SpecDec++: a trained head (2405.19715)", "draft bench --draft {model} --gamma 4 --policy head:0.7", "decoding/test_policies.py::test_generate_and_bench_follow_every_policy"),
    System("SmartSpec: goodput (2406.14066)", "draft bench --draft {model} --gamma 4 --policy goodput", "decoding/test_policies.py::test_goodput_drafts_less_where_less_is_accepted_and_where_the_batch_is_large"),
    System("SmartSpec, 3 prompts at a time", "draft bench --draft {model} --gamma 4 --policy goodput --batch-size 3", "decoding/test_policies.py::test_generate_and_bench_follow_every_policy"),
    System("A static batch", "draft bench --drafter suffix --batch-size 3", _GATE),
    System("A pool that refills, against plain static batches", "draft bench --drafter suffix --batch-size 3 --pool", "decoding/test_benchmark.py::test_a_pool_gives_the_outputs_of_single_sequences", "pool"),
    System("Typical acceptance, lossy (2401.10774)", "draft bench --draft {model} --gamma 2 --lossy typical", "decoding/test_lossy.py::test_the_law_of_the_emitted_token_is_that_of_the_code"),
    System("The target's K best, lossy", "draft bench --draft {model} --gamma 2 --lossy accept_k:3", "decoding/test_lossy.py::test_bench_never_calls_it_lossless"),
    System("A compressed image prefix, as ViSpec (2509.15235) and SpecVLM (2509.11815): image_tokens 4", "draft bench --target TARGET --draft DRAFT --prompts FILE.jsonl --gamma 4", _IMAGES),
    System("A draft that attends to text alone, after MSD (2505.14260): image_tokens 0", "draft bench --target TARGET --draft DRAFT --prompts FILE.jsonl --gamma 4", _IMAGES),
    System("A draft that reads every image token, its states fused of several layers; what is covered of DREAM (2505.19201)", "draft bench --target TARGET --draft DRAFT --prompts FILE.jsonl --gamma 4", _IMAGES),
    System("LANTERN: neighbours of image tokens, lossy (2410.03355)", "draft bench --target TARGET --prompts FILE.jsonl --draft DRAFT --temperature 1 --lossy lantern:4:0.3", _RELAXED),
    System("LANTERN++: bounded by the token's own probability, lossy (2502.06352)", "draft bench --target TARGET --prompts FILE.jsonl --draft DRAFT --temperature 1 --lossy lantern++:4:3", _RELAXED),
    System("GSD: groups of image tokens, lossy (2508.07747)", "draft bench --target TARGET --prompts FILE.jsonl --draft DRAFT --temperature 1 --lossy gsd", _RELAXED),
    System("Encoder-decoder targets", "draft bench --target TARGET --prompts FILE.jsonl --drafter lookup", "decoding/test_encoder_decoder.py::test_the_command_line_decodes_and_measures"),
    System("State-space targets (Mamba)", "draft bench --target TARGET --prompts FILE.jsonl --drafter lookup", "decoding/test_state_space.py::test_the_command_line_decodes_and_measures"),
    System("Costs of drafting, by kind", "draft plan --target TARGET", "decoding/test_planning.py::test_plan_without_a_draft_compares_the_kinds_in_eighty_columns"),
    System("PEARL: draft and target at once, as a column (2408.11850)", "draft plan --target TARGET --draft DRAFT", "decoding/test_theory.py::test_the_closed_form_is_the_mean_of_the_schedule"),
    System("The best length of each batch size", "draft plan --target TARGET --draft DRAFT --batch 1,4,16", "decoding/test_planning.py::test_each_batch_size_has_its_own_best_length"),
    System("Leviathan's tables", "draft plan --theory", "decoding/test_planning.py::test_theory_is_the_papers_table"),
)  # fmt: skip
