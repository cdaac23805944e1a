"""BLEU, chrF and perplexity as `evaluate.Metric` classes that need no network."""

import contextlib
import functools
import importlib
import inspect
import math
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import evaluate
import regex
from sacrebleu.metrics import BLEU, CHRF

from ..errors import UserError, reading, texts_in

# Of writing without spaces between words, of which sacreBLEU's default, 13a, takes a whole clause for one.
_LANGUAGES = {"zh": "zh zho cmn yue wuu", "ja": "ja jpn", "ko": "ko kor", "char": "th tha lo lao km khm my bo dz"}
_FEWEST_TO_COMPARE = 30  # sentences that differ
_KANA, _CHAR = r"\p{Hiragana}\p{Katakana}", r"\p{Line_Break=SA}\p{Line_Break=AK}\p{Tibetan}"
_WORDS = regex.compile(
    rf"(?V1)(?P<ja>[{_KANA}])|(?P<zh>\p{{Han}})|(?P<char>[{_CHAR}])|(?P<ko>\p{{Hangul}}+)"
    rf"|[\p{{L}}\p{{M}}--[{_KANA}{_CHAR}\p{{Han}}\p{{Hangul}}]]+"
)


class TranslationMetric(evaluate.Metric):
    """Corpus BLEU and chrF by sacreBLEU, cased and detokenised, with their signatures.

    `TranslationMetric().compute(predictions=[...], references=[...])` takes one reference per prediction (strings) and
    returns `bleu` and `chrf` (0 to 100), `bleu_signature`, `chrf_signature` and `exact_match` (percent of predictions
    equal to their reference but for spaces around it, of what is not blank on both sides); `tokenizer` and `language`
    are as in `bleu_metric`. It needs no network: `evaluate.load` would download a metric's code from the Hub.

    Raises:
        ValueError: from `compute`, for no predictions or a different number of references.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Corpus BLEU and chrF by sacreBLEU, cased and detokenised, with their signatures.",
            citation="Matt Post. 2018. A Call for Clarity in Reporting BLEU Scores.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def add_batch(self, *, predictions, references):
        """Add texts, one string as one text; `compute` begins with it."""
        super().add_batch(predictions=texts_in(predictions, "prediction"), references=texts_in(references, "reference"))

    def _compute(self, predictions, references, **options):
        return score_translations(predictions, references, bleu_metric(references, **options))


def perplexity(losses: Sequence[float], counts: Sequence[int]) -> float:
    """Compute exp of the nats a token, at most e^700, of sums and numbers of tokens as `score_pairs` returns them."""
    return math.exp(min(math.fsum(losses) / sum(counts), 700.0))


def bleu_metric(references: Sequence[str], tokenizer: str | None = None, language: str | None = None, **more) -> BLEU:
    """Return sacreBLEU's BLEU with this tokenizer; raises `UserError` for one that is not installed or downloaded.

    By default it goes by the target language (`zh`, `ja-JP`, `tha`), or where that decides nothing by how most words of
    the references are written: `zh` for Chinese; `ja-mecab` and `ko-mecab`, or `char` where these are not installed;
    `char` for Thai, Lao, Khmer, Burmese, Tibetan and other writing without spaces between words; else `13a`.
    """
    if tokenizer is not None:
        with reading(f"BLEU's tokenizer {tokenizer}"):
            return BLEU(tokenize=tokenizer, **more)
    code = re.split("[-_]", language or "")[0].lower()
    kind = next((kind for kind, codes in _LANGUAGES.items() if code in codes.split()), None)
    if kind is None:
        counts = Counter(match.lastgroup for match in _WORDS.finditer("\n".join(references)))
        if counts["ja"] * 3 > counts["zh"]:  # Japanese is half kana, and Chinese quotes a few
            counts["ja"] += counts.pop("zh", 0)
        kind = max(counts, key=counts.get, default=None)
    with contextlib.suppress(RuntimeError):  # MeCab is not installed
        return BLEU(tokenize=f"{kind}-mecab" if kind in ("ja", "ko") else kind or "13a", **more)
    return BLEU(tokenize="char", **more)


def score_translations(predictions: Sequence[str], references: Sequence[str], bleu: BLEU | None = None) -> dict:
    """Compute the scores of `TranslationMetric`, without its files, with another `bleu` than that of `bleu_metric`."""
    if not predictions or len(predictions) != len(references):
        numbers = f"{len(predictions)} predictions and {len(references)} references"
        raise ValueError(f"{numbers}: give as many of both, above 0")
    bleu, chrf = bleu or bleu_metric(references), CHRF()
    filled = [pair for pair in zip(predictions, references, strict=True) if any(map(str.strip, pair))]
    return {
        "bleu": bleu.corpus_score(predictions, [references]).score,
        "chrf": chrf.corpus_score(predictions, [references]).score,
        "exact_match": 100 * sum(one.strip() == other.strip() for one, other in filled) / max(1, len(filled)),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def compare_systems(systems: Sequence[tuple[str, Sequence[str]]], references: Sequence[str], bleu: BLEU) -> dict:
    """Compare named lists of translations with the first of them by paired bootstrap resampling (Koehn, 2004).

    Returns:
        `systems`: for each its `name`, `bleu` and `chrf`, the ends of their 95% intervals, `bleu_interval` and
        `chrf_interval`, and `bleu_p` and `chrf_p`, as `sacrebleu --paired-bs` prints them, None where they say nothing;
        `verdicts`: of each metric and further system, in words; and the signatures.
    """
    from sacrebleu.significance import PairedTest

    signatures, results = PairedTest(systems, {"bleu": bleu, "chrf": CHRF()}, [references], "bs")()
    first, *others = rows = [{"name": name} for name, _ in systems]
    scores = {"systems": rows, "verdicts": []}
    for metric, name in (("bleu", "BLEU"), ("chrf", "chrF2")):
        scores[f"{metric}_signature"] = str(signatures[name])
        for row, result in zip(rows, results[name], strict=True):
            interval = [float(result.mean - result.ci), float(result.mean + result.ci)]  # of numpy's floats
            row |= {metric: float(result.score), f"{metric}_interval": interval, f"{metric}_p": result.p_value}
        for row, (_, texts) in zip(others, systems[1:], strict=True):
            difference, p = row[metric] - first[metric], row[f"{metric}_p"]
            # Of a few sentences, or where a few differ, sacreBLEU's p is small though nothing is shown.
            counts = difference and sum(map(operator.ne, texts, systems[0][1])) >= _FEWEST_TO_COMPARE
            words = f"is {'better' if difference > 0 else 'worse'} than"
            words = words if counts and p < 0.05 else "shows no difference on this test set from"
            row[f"{metric}_p"], p_value = (p, f", p = {p:.3f}") if counts else (None, "")
            scores["verdicts"].append(f"{row['name']} {words} {first['name']}: {name[:4]} {difference:+.2f}{p_value}")
    return scores


def load_checker(name: str) -> Callable[[str, str, str], Any]:
    """Import a function of three texts, `MODULE:FUNCTION`, of an installed module or one in the current folder."""
    module, _, function = name.partition(":")
    with reading(f"--checker {name} (MODULE:FUNCTION of source, output and reference)"):
        sys.path.append(str(Path.cwd()))  # last: no file of this folder is imported in place of an installed module
        check = getattr(importlib.import_module(module), function)
        inspect.signature(check).bind("source", "output", "reference")
    return check


def check_outputs(name: str, texts: Iterable[tuple[str, str, str]]) -> dict[str, float]:
    """Return the means, by name, of the numbers that a checker returns for each source, output and reference.

    It returns a dict of numbers or booleans, or one alone, which gets the name of the function. A tuple `(part, whole)`
    counts as a fraction: the sums of both are divided, as a corpus's errors by its words. Blank lines are left out.
    """
    check, parts, wholes = load_checker(name), Counter(), Counter()
    for line, triple in enumerate(texts, 1):
        if not any(map(str.strip, triple)):
            continue
        with reading(f"--checker {name}, line {line}"):
            values = check(*triple)
            for key, value in (values if isinstance(values, dict) else {name.rpartition(":")[2]: values}).items():
                part, whole = value if isinstance(value, tuple) else (value, 1)
                parts[str(key)] += Fraction(float(part))  # which refuses what is not finite
                wholes[str(key)] += Fraction(float(whole))
    return {key: float(part / (wholes[key] or 1)) for key, part in parts.items()}


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
    the output into ASCII. It is for German; French compounds stay whole, since no source says they were split.
    """
    tokens = map(moses_tokenizer(language), texts)
    return list(map(split_compounds, tokens) if language == "de" else tokens)


def paper_bleu(translations: Sequence[str], references: Sequence[str], language: str) -> float:
    """Compute BLEU as in Table 2, 0 to 100, of detokenised sentences in a language (`"de"`, `"fr"`, ...).

    It is that of Moses' multi-bleu.perl: cased, unsmoothed, one reference; 0 if no 4-gram of the whole corpus is right.

    Raises:
        UserError: as `moses_tokenizer`. ValueError: for no translations or a different number of references.
    """
    translations, references = zip(*zip(translations, references, strict=True), strict=True)
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(paper_tokens(translations, language), [paper_tokens(references, language)]).score
