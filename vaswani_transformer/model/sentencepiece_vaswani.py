"""Texts as SentencePiece reads them, where a backend of `tokenizers` with the same pieces would read them otherwise.

Two things differ. SentencePiece replaces the longest match of its table of characters, wherever it is; the
normaliser `Precompiled` of `tokenizers` looks at one grapheme at a time and replaces all of it by the value of its
shortest prefix, so that an accent after a ligature is lost. And a language code such as ``>>fra<<`` is a token at the
start of a text only, for `MarianTokenizer`; for `tokenizers` it is one anywhere. Texts in which either may happen are
rewritten before the backend reads them.
"""

import base64
import json
import re
from array import array
from functools import lru_cache

# Signs without a meaning in Unicode (unassigned), which no text holds of itself after `SentencePieceText`.
SEPARATOR = "\ufff0"  # ends a grapheme, and is removed by the backend after `Precompiled`
STRANGER = "\ufff1"  # in place of another of these signs in a text: as unknown as that
LESS_THAN = "\ufff2"  # "<" of a text, so that no text spells "</s>" or another name with "<"
UNKNOWN_CODE = "\ufff3"  # a language code that the vocabulary lacks
MADE_UP = "\ufff4"  # begins the name of an entry of the vocabulary that no text can become
RUN_START, RUN_END = "\ufff5", "\ufff6"  # around characters that the model has no pieces for

# Characters of which each is a grapheme of its own beside any other of these. The others take the slower way.
_PLAIN = (
    " -~\u00a0-\u02ff\u0370-\u0482\u048a-\u058f\u05d0-\u05ea\u0620-\u064a\u0660-\u066f\u0671-\u06d3\u1e00-\u1fff"
    "\u2000-\u200a\u2010-\u2027\u202f-\u205f\u2070-\u20cf\u2100-\u2bff\u3000-\u3029\u3030-\u3098\u309b-\u3130\u318f-\ua4cf"
    "\uac00-\ud7a3\uff01-\uff9d\U0001f300-\U0001f3fa\U0001f400-\U0001faff\U00020000-\U0003fffd"
)
OTHERS = re.compile(f"[^{_PLAIN}]+")
# A match of several characters begins with any and goes on with others than plain ones (`importing/sentencepiece.py`
# takes no other table), so none reaches over the border of such a run.
_RUN = re.compile(f".?{OTHERS.pattern}", re.DOTALL)
_RESERVED = re.compile(f"[{SEPARATOR}{LESS_THAN}-{RUN_END}]")
_MOST_CACHED = 1 << 16

# A unit of a Darts-clone trie: the byte that leads to it, whether the key so far has a value, where its children are.
LABEL, HAS_VALUE, VALUE = 0x800000FF, 0x100, 0x7FFFFFFF


def below(unit):
    """Return the number by which a unit's place differs from that of its children, before their bytes."""
    return unit >> 10 << ((unit & 0x200) >> 6)


class CharacterMap:
    """The table of a SentencePiece model that replaces characters: its `precompiled_charsmap`, a Darts trie."""

    def __init__(self, precompiled: bytes):
        size = int.from_bytes(precompiled[:4], "little")
        self.units = array("I")
        if self.units.itemsize != 4 or size == 0 or size % 4 or 4 + size > len(precompiled):
            raise ValueError("the table of characters is damaged")
        self.units.frombytes(precompiled[4 : 4 + size])
        self._values = precompiled[4 + size :]

    def __call__(self, text: str) -> str:
        """Return the text with every longest match from the left replaced, by whatever a damaged table has for it."""
        data, place, parts = text.encode("utf-8"), 0, []
        while place < len(data):
            value, place = self._longest(data, place)
            parts.append(value)
        return b"".join(parts).decode("utf-8", "replace")

    def _longest(self, text: bytes, start: int) -> tuple[bytes, int]:
        """Return the value of the longest entry that starts at `start` and its end, or the byte that is there."""
        units, value, end = self.units, text[start : start + 1], start + 1
        node = below(units[0])
        for place in range(start, len(text)):
            node ^= text[place]
            if node >= len(units) or units[node] & LABEL != text[place]:
                break
            unit = units[node]
            node ^= below(unit)
            if unit & HAS_VALUE and node < len(units):
                value, end = self._values[units[node] & VALUE :].partition(b"\0")[0], place + 1
        return value, end


class SentencePieceText:
    """Rewrites texts for a backend of `importing/sentencepiece.py`; `for_backend` is None for any other."""

    def __init__(self, precompiled: bytes | None, codes: frozenset[str]):
        self._map = CharacterMap(precompiled) if precompiled else None
        self._codes = codes
        self._rewritten = lru_cache(_MOST_CACHED)(self._rewrite)  # of runs of characters

    @classmethod
    def for_backend(cls, backend) -> "SentencePieceText | None":
        """Return the rewriter that a backend needs: None if it was not made from a SentencePiece model."""
        state = json.loads(backend.normalizer.__getstate__()) if backend.normalizer is not None else {}
        rules = state.get("normalizers", [])
        if not any(rule.get("pattern") == {"String": SEPARATOR} for rule in rules):
            return None
        tables = [rule["precompiled_charsmap"] for rule in rules if rule["type"] == "Precompiled"]
        added = (token.content for token in backend.get_added_tokens_decoder().values())
        codes = frozenset(token for token in added if token.startswith(">>") and token.endswith("<<"))
        return cls(base64.b64decode(tables[0]) if tables else None, codes)

    def __call__(self, text: str) -> str:
        """Return the text as the backend must get it; the same object where there is nothing to change."""
        code = ""
        if self._codes and text.startswith(">>") and (end := text.find("<<")) != -1:
            code, text = text[: end + 2], text[end + 2 :]
            code = code if code in self._codes else UNKNOWN_CODE
        text = _RUN.sub(lambda match: self._rewritten(match.group()), text)
        if self._codes:
            text = text.replace("<<", f"<{SEPARATOR}<")
        return code + text

    def _rewrite(self, run: str) -> str:
        run = _RESERVED.sub(STRANGER, run)
        return run if self._map is None else f"{SEPARATOR}{SEPARATOR.join(self._map(run))}{SEPARATOR}"
