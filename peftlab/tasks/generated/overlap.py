"""BLEU, NIST and ROUGE-L by the packages of the extra ``metrics``, of lower-case words as in E2E's own script."""

from __future__ import annotations

from collections.abc import Sequence

from peftlab.tasks.generated.contexts import Answer


def bleu(answers: Sequence[Answer]) -> float:
    """Return BLEU of all answers against all references, 0 to 100: sacrebleu, mteval-13a words."""
    import sacrebleu

    most = max(len(answer.references) for answer in answers)
    # sacrebleu takes the n-th reference of every answer together; an empty text where there are fewer.
    streams = [[answer.references[n] if n < len(answer.references) else "" for answer in answers] for n in range(most)]
    return float(sacrebleu.corpus_bleu([answer.text for answer in answers], streams, lowercase=True).score)


def nist(answers: Sequence[Answer]) -> float:
    """Return NIST of all answers against all references, n-grams up to 5: nltk, mteval-13a words."""
    from nltk.translate.nist_score import corpus_nist
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenizer = Tokenizer13a()

    def words(text: str) -> list[str]:
        return str(tokenizer(text.lower())).split()

    written = [words(answer.text) for answer in answers]
    longest = max(map(len, written))
    if longest == 0:
        return 0.0
    # nltk divides by the number of n-grams; where there are none they add nothing to the sum.
    return float(corpus_nist([[*map(words, answer.references)] for answer in answers], written, n=min(5, longest)))


def rouge_l(answers: Sequence[Answer]) -> list[float]:
    """Return the F-measure of each answer's longest common subsequence with its best reference: rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return [float(scorer.score_multi(list(a.references), a.text)["rougeL"].fmeasure) for a in answers]
