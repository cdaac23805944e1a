"""BLEU, chrF and perplexity as `evaluate.Metric` classes that need no network."""

import math

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF


class TranslationMetric(evaluate.Metric):
    """Corpus BLEU and chrF by sacreBLEU, cased and detokenised, with their signatures.

    `TranslationMetric().compute(predictions=[...], references=[...])` takes one reference a prediction (strings) and
    returns `bleu` and `chrf` (0 to 100), `bleu_signature`, `chrf_signature` and `exact_match` (percent of predictions
    equal to their reference). `evaluate.load` would fetch its code from the Hub; this class is its own code.

    Raises:
        ValueError: from `compute`, for no predictions or a different number of references.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Corpus BLEU and chrF by sacreBLEU.",
            citation="Matt Post. 2018. A Call for Clarity in Reporting BLEU Scores.",
            inputs_description="predictions and references: one string each a sentence.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references):
        return score_translations(predictions, references)


class PerplexityMetric(evaluate.Metric):
    """exp of the mean negative log-probability of a token.

    `PerplexityMetric().compute(predictions=losses, references=counts)` takes for each sentence its negative
    log-probability in nats and its number of tokens, as `score_pairs` gives them, and returns `perplexity`.

    Raises:
        ValueError: from `compute`, for no tokens.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Perplexity a token from log-probabilities of sentences.",
            citation="",
            inputs_description="predictions: nats a sentence; references: tokens a sentence.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        if not sum(references):
            raise ValueError("no tokens to compute a perplexity of")
        return {"perplexity": math.exp(min(math.fsum(predictions) / sum(references), 700.0))}


def score_translations(predictions: list[str], references: list[str], tokenize: str = "13a") -> dict:
    """What `TranslationMetric` computes, without its files.

    Args:
        predictions: translations.
        references: one a prediction.
        tokenize: sacreBLEU's tokenisation for BLEU.

    Raises:
        ValueError: for no predictions or a different number of references.
    """
    if not predictions or len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions and {len(references)} references: give as many of both, above 0"
        )
    bleu, chrf = BLEU(tokenize=tokenize), CHRF()
    exact = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
    return {
        "bleu": bleu.corpus_score(predictions, [references]).score,
        "chrf": chrf.corpus_score(predictions, [references]).score,
        "exact_match": 100 * exact / len(predictions),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }
