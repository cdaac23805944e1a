"""BLEU, chrF and perplexity as `evaluate.Metric` classes that need no network."""

import math
import re
from collections.abc import Sequence

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF

from ..errors import UserError


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
        return {"perplexity": perplexity(predictions, references)}


def perplexity(losses: Sequence[float], counts: Sequence[int]) -> float:
    """What `PerplexityMetric` computes, without its files: exp of the nats a token, at most e^700.

    Args:
        losses: negative log-probability of each sentence, in nats.
        counts: number of its tokens.

    Raises:
        ValueError: for no tokens.
    """
    if not sum(counts):
        raise ValueError("no tokens to compute a perplexity of")
    return math.exp(min(math.fsum(losses) / sum(counts), 700.0))


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


NEEDED = "Moses' tokeniser is not installed: pip install 'vaswani_transformer[moses]'"


def split_compounds(text: str) -> str:
    """`a-b` as `a ##AT##-##AT## b`, as tensor2tensor's get_ende_bleu.sh and fairseq's compound_split_bleu.sh do."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)


def moses_tokenizer(language: str):
    """Moses' tokeniser of a language, as a function from raw text to tokens between spaces, special signs escaped.

    Args:
        language: ISO 639-1, such as `"de"`; it decides which full stops end abbreviations.

    Raises:
        UserError: where the library sacremoses, Moses' tokenizer.perl in Python, is not installed, and for a language
            that it does not know (it would take the rules of English without a word).
    """
    try:
        from sacremoses import MosesTokenizer
        from sacremoses.corpus import NonbreakingPrefixes
    except ImportError as error:
        raise UserError(NEEDED) from error
    languages = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in languages:
        raise UserError(f"Moses' tokeniser knows no language {language!r}: give one of {', '.join(languages)}")
    tokenizer = MosesTokenizer(lang=language)
    return lambda text: tokenizer.tokenize(text, return_str=True)


def paper_tokens(texts: Sequence[str], language: str) -> list[str]:
    """Raw text as the authors' script gets it ready for BLEU: Moses' tokens; in German, compounds split at hyphens.

    The script is get_ende_bleu.sh of tensor2tensor, in its first form; a later one turns Unicode punctuation in the
    output into ASCII before. It is for German; French stays unsplit here, as nobody says that it was split.

    Args:
        texts: detokenised sentences.
        language: `"de"`, `"fr"`, ...

    Raises:
        UserError: as `moses_tokenizer`.
    """
    tokenize = moses_tokenizer(language)
    tokens = [tokenize(text) for text in texts]
    return [split_compounds(text) for text in tokens] if language == "de" else tokens


def multi_bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU (0 to 100) of tokens between spaces, as Moses' multi-bleu.perl prints it: cased, unsmoothed, one reference.

    It is 0 where no 4-gram of the whole corpus is right.

    Args:
        translations: tokenised sentences.
        references: one a translation.

    Raises:
        ValueError: for no translations or a different number of references.
    """
    if not translations or len(translations) != len(references):
        raise ValueError(f"{len(translations)} translations and {len(references)} references: give as many, above 0")
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(list(translations), [list(references)]).score


def paper_bleu(translations: Sequence[str], references: Sequence[str], language: str) -> float:
    """BLEU of Table 2's kind: `multi_bleu` of `paper_tokens`.

    Args:
        translations: detokenised text.
        references: one a translation, detokenised too.
        language: of both.

    Raises:
        UserError: as `moses_tokenizer`.
        ValueError: as `multi_bleu`.
    """
    return multi_bleu(paper_tokens(translations, language), paper_tokens(references, language))
