"""BLEU as the paper computed it: on tokenised text, German compounds put apart at their hyphens."""

import re
from collections.abc import Sequence

from sacrebleu.metrics import BLEU

from ..errors import UserError

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
