"""How to decode with a draft: the settings that ``benchmark`` and ``generate`` share."""

from __future__ import annotations

from dataclasses import dataclass

from peftlab.decoding.lossy import LossyRule
from peftlab.decoding.policies import Fixed
from peftlab.decoding.sampled_trees import GrowthFactory
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.table import NamedRule, lossy, policy, tree, verifier, window
from peftlab.decoding.verify import TRAVERSAL, Verifier
from peftlab.drafting.load import Pair, check_tree, drafts_with_heads, load_pair
from peftlab.drafting.text import index_corpus, read_documents
from peftlab.errors import PeftlabError
from peftlab.models.dtypes import torch_dtype
from peftlab.registry import resolve


@dataclass(frozen=True)
class DecodingOptions:
    """Settings of speculative decoding.

    Attributes:
        max_new_tokens: length of the longest output.
        gamma: tokens drafted for one target step; the first number for the policy ``heuristic``, the most for others.
        width: choices of each Medusa head in a tree of ``gamma`` tokens, or children of an eagle3 layer's node; 1 is a
            chain, None the best tree as measured for heads, else a chain.
        policy: how the draft length is chosen, NAME or NAME:X of ``decoding.table.POLICIES``.
        temperature: 0 is greedy. top_k, top_p: restrict sampling; None does not. seed: of sampling.
        dtype: of the target: ``fp32``, ``bf16`` or ``fp16``. draft_dtype: of the draft; None: the target's.
        device: where the models run: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        pack: store the weights in the layout of fast kernels (CPU).
        corpus: file of texts that ``suffix`` copies from, as ``read_documents`` takes it.
        lossy: NAME or NAME:X of ``decoding.table.LOSSY``: accept drafted tokens by it, so that the output is no longer
            the target's; None: exactly.
        tree: NAME:W of ``decoding.table.TREES``: a tree of ``gamma`` nodes drawn from a draft model; None: a chain.
        verify: NAME of ``decoding.table.VERIFIERS``, how sampled drafts are verified; None: ``traversal``.
        draft_window: SINKS:LAST, the first and the last tokens that the draft sees; None: all.
    """

    max_new_tokens: int = 64
    gamma: int = 4
    width: int | None = None
    policy: str = "fixed"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    dtype: str = "fp32"
    draft_dtype: str | None = None
    pack: bool = True
    corpus: str | None = None
    device: str = "auto"
    lossy: str | None = None
    tree: str | None = None
    verify: str | None = None
    draft_window: str | None = None

    def sampling(self) -> Sampling:
        """Return how tokens are chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def length(self) -> NamedRule:
        """Return the rule of draft length.

        Raises:
            PeftlabError: no such rule, or a ``gamma`` that drafts nothing.
        """
        Fixed(self.gamma)
        return policy(self.policy)

    def lossy_rule(self) -> LossyRule | None:
        """Return the lossy rule; None verifies exactly.

        Raises:
            PeftlabError: no such rule.
        """
        return None if self.lossy is None else LossyRule.of(lossy(self.lossy))

    def grow(self) -> GrowthFactory | None:
        """Return what makes the growth of drawn trees; None drafts as the draft does by itself.

        Raises:
            PeftlabError: no such tree.
        """
        if self.tree is None:
            return None
        chosen = tree(self.tree)
        made: GrowthFactory = resolve(chosen.row.make)(chosen.value)
        return made

    def verifier(self) -> Verifier:
        """Return what verifies sampled drafts.

        Raises:
            PeftlabError: no such verifier, or one with nothing to verify: greedily, beside a lossy rule, or without the
                tree that it needs.
        """
        if self.verify is None:
            return TRAVERSAL
        chosen = verifier(self.verify)
        if self.sampling().greedy:
            raise PeftlabError(f"verify {self.verify}: temperature 0 is greedy, where all verify alike; leave it out")
        if self.lossy is not None:
            raise PeftlabError(f"verify {self.verify}: lossy {self.lossy} takes its place; give one of them")
        if chosen.row.needs and (self.tree is None or tree(self.tree).name != chosen.row.needs):
            raise PeftlabError(f"verify {self.verify}: verifies independent drafts; give tree {chosen.row.needs}:W")
        found: Verifier = resolve(chosen.row.make)
        return found

    def load(self, target: str, draft: str | None) -> Pair:
        """Load target and draft in their dtypes; a tree that does not fit the draft is found before."""
        heads = drafts_with_heads(draft)
        check_tree(self.width, self.tree is not None, drafted=draft is not None, heads=heads)
        seen = None if self.draft_window is None else window(self.draft_window)
        if seen is not None and draft is None:
            raise PeftlabError(f"draft_window {self.draft_window}: no draft is given to see it")
        dtype = torch_dtype(self.dtype)
        draft_dtype = dtype if self.draft_dtype is None else torch_dtype(self.draft_dtype, "draft_dtype")
        documents = None if self.corpus is None else read_documents(self.corpus)
        pair = load_pair(target, draft, dtype=dtype, draft_dtype=draft_dtype, device=self.device, pack=self.pack)
        pair.window = seen
        if documents is not None:
            pair.corpus = index_corpus(documents, pair.tokenizer)
        return pair
