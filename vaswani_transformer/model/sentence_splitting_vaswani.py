"""A text divided into its sentences by a simple rule."""

import re

# Words before a full stop that ends no sentence: always, and before a number.
_ABBREVIATION = re.compile(
    r"mr|mrs|ms|mx|dr|prof|st|jr|sr|rev|gen|col|sgt|capt|lt|vs|etc|al|inc|ltd|co|corp|dept|approx|cf|mme|mlle"
    r"|hr|fr|bzw|usw|ca|vgl|evtl|ggf|hrsg|sog|inkl|zzgl",
    re.IGNORECASE,
)
_ABBREVIATION_BEFORE_NUMBER = re.compile(
    r"nos?|nr|figs?|eqs?|vol|pp|ch|sec|art|abs|bd|kap|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec", re.IGNORECASE
)
# Terminal punctuation, closing quotes or brackets after it, a space; Chinese and Japanese put none there.
_SENTENCE_END = re.compile(r"""[.!?…]+["'”’»“)\]]*(?=\s+[^\s]) | [。！？]+[”’」』）]* | (?=\n[^\S\n]*\n)""", re.VERBOSE)
_OPENING = "\"'„“”‘‚«»([¿¡-–—"


def split_into_sentences(text: str) -> list[str]:
    """Split a text into sentences by a simple rule; for hard text give the pipeline a segmenter of your own.

    A sentence ends at `.`, `!`, `?` or `…` before a space that no small letter follows, at `。`, `！` or `？`, and at
    an empty line. A full stop ends none after common English and German abbreviations, single letters ("J. Smith",
    "z. B.") and numbers of one or two digits ("am 3. Oktober"). Where the rule is in doubt it leaves sentences
    together. Nothing but white space is lost.

    Args:
        text: any text.

    Returns:
        the sentences without white space around them; none for a blank text.
    """
    sentences, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        end = match.end()
        if match.group() and match.group()[0] in ".!?…":
            follower = text[end:].lstrip().lstrip(_OPENING)[:1]
            if follower.islower() or (match.group() == "." and _is_no_end(text[start : match.start()], follower)):
                continue
        sentences.append(text[start:end].strip())
        start = end
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_no_end(before: str, follower: str) -> bool:
    """Whether a full stop between these marks an abbreviation, an initial or an ordinal number."""
    words = before.split()
    word = words[-1].lstrip(_OPENING) if words else ""
    last = re.split(r"[.\-]", word)[-1]  # of "z.B" or "e.g" the last letter
    return (
        _ABBREVIATION.fullmatch(last) is not None
        or (follower.isdigit() and _ABBREVIATION_BEFORE_NUMBER.fullmatch(last) is not None)
        or (len(last) == 1 and last.isalpha())
        or re.fullmatch(r"\d{1,2}", word) is not None
    )
