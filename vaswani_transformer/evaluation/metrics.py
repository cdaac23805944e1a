"""BLEU, chrF and perplexity as `evaluate.Metric` classes that need no network."""

import functools
import math
import re
from collections.abc import Callable, Sequence

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF

from ..errors import UserError, reading


class TranslationMetric(evaluate.Metric):
    """Corpus BLEU and chrF by sacreBLEU, cased and detokenised, with their signatures.

    `TranslationMetric().compute(predictions=[...], references=[...])` takes one reference per prediction (strings) and
    returns `bleu` and `chrf` (0 to 100), `bleu_signature`, `chrf_signature` and `exact_match` (percent of predictions
    equal to their reference). It needs no network: `evaluate.load` would download a metric's code from the Hub.

    Raises:
        ValueError: from `compute`, for no predictions or a different number of references.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Corpus BLEU and chrF by sacreBLEU.",
            citation="Matt Post. 2018. A Call for Clarity in Reporting BLEU Scores.",
            inputs_description="predictions and references: one string per sentence.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references):
        return score_translations(predictions, references)


class PerplexityMetric(evaluate.Metric):
    """Perplexity: exp of the mean negative log-probability of a token.

    `PerplexityMetric().compute(predictions=losses, references=counts)` takes each sentence's negative log-probability
    in nats and its number of tokens, as `score_pairs` returns them, and returns `perplexity`.

    Raises:
        ZeroDivisionError: from `compute`, for no tokens.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Perplexity per token from log-probabilities of sentences.",
            citation="",
            inputs_description="predictions: nats per sentence; references: tokens per sentence.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references):
        return {"perplexity": perplexity(predictions, references)}


def perplexity(losses: Sequence[float], counts: Sequence[int]) -> float:
    """Compute exp of the nats a token, at most e^700, as `PerplexityMetric` without its files."""
    return math.exp(min(math.fsum(losses) / sum(counts), 700.0))


def score_translations(predictions: Sequence[str], references: Sequence[str]) -> dict:
    """Compute the scores of `TranslationMetric`, without its files."""
    _check_pairs(predictions, references)
    bleu, chrf = BLEU(), CHRF()
    exact = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
    return {
        "bleu": bleu.corpus_score(predictions, [references]).score,
        "chrf": chrf.corpus_score(predictions, [references]).score,
        "exact_match": 100 * exact / len(predictions),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def _check_pairs(predictions: Sequence[str], references: Sequence[str]) -> None:
    if not predictions or len(predictions) != len(references):
        raise ValueError(
            f"{len(predictions)} predictions and {len(references)} references: give as many of both, above 0"
        )


def split_compounds(text: str) -> str:
    """Write `a-b` as `a ##AT##-##AT## b`: tensor2tensor's get_ende_bleu.sh, fairseq's compound_split_bleu.sh."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)


def moses_tokenizer(language: str) -> Callable[[str], str]:
    """Return Moses' tokeniser: a function from raw text to tokens between spaces, special characters escaped.

    Raises:
        UserError: if sacremoses, Moses' tokenizer.perl in Python, is not installed, and for an ISO 639-1 code that it
            does not know (it would silently apply the rules of English).
    """
    with reading("Moses' tokeniser (pip install 'vaswani_transformer[moses]')"):
        from sacremoses import MosesTokenizer
        from sacremoses.corpus import NonbreakingPrefixes
    languages = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in languages:
        raise UserError(f"Moses' tokeniser knows no language {language!r}: give one of {', '.join(languages)}")
    return functools.partial(MosesTokenizer(lang=language).tokenize, return_str=True)


def paper_tokens(texts: Sequence[str], language: str) -> list[str]:
    """Prepare raw text as the authors' script does for BLEU: Moses' tokens; in German, compounds split at hyphens.

    The script is get_ende_bleu.sh of tensor2tensor in its first form; a later one first turns Unicode punctuation in
    the output into ASCII. It is for German; French compounds stay whole here, since no source says that they were
    split.
    """
    tokens = map(moses_tokenizer(language), texts)
    return list(map(split_compounds, tokens) if language == "de" else tokens)


def multi_bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Compute BLEU (0 to 100) of tokens as Moses' multi-bleu.perl prints it: cased, unsmoothed, one reference.

    It is 0 if no 4-gram of the whole corpus is right.
    """
    _check_pairs(translations, references)
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(translations, [references]).score


def paper_bleu(translations: Sequence[str], references: Sequence[str], language: str) -> float:
    """Compute BLEU as in Table 2, 0 to 100, of detokenised sentences in a language (`"de"`, `"fr"`, ...).

    Raises:
        UserError: as `moses_tokenizer`.
        ValueError: for no translations or a different number of references.
    """
    return multi_bleu(paper_tokens(translations, language), paper_tokens(references, language))
