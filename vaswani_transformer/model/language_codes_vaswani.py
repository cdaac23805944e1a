"""Codes of the target language before a text, such as ``>>fra<<`` (OPUS-MT) or ``<2fr>``, for models of several."""

import re
from functools import cached_property

_LANGUAGE = r"[a-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*"
_TAG = re.compile(rf"\s*(>>{_LANGUAGE}<<|<2{_LANGUAGE}>)\s*(?=\S)")  # no text begins so of itself
# Tokens that are codes: all in Marian's form, M2M100's `__fr__`, users' `<2fr>`, `[2fr]`, `<fr>`. `<num>` is none.
_TOKEN = re.compile(rf">>([^<>\s]+)<<|__({_LANGUAGE})__|[<\[](?:2({_LANGUAGE})|([a-z]{{2}}(?:[-_]\w+)?))[>\]]")
_SURE = {"ar", "cs", "de", "en", "es", "fr", "it", "ja", "ko", "pl", "pt", "ru", "zh"}  # unlike `<br>`, `<nl>`, `<id>`
_BEGINNING = re.compile(rf"\s*({_TOKEN.pattern})\s*(?=\S)")


def typed_code(text: str, pattern: re.Pattern = _TAG) -> tuple[str, str]:
    """Return the tag before a text, with a space if there was any, and the text behind; "" and the text for none."""
    match = pattern.match(text)
    return (re.sub(r"\s+", " ", match[0].lstrip()), text[match.end() :]) if match else ("", text)


class LanguageCodes:
    """Puts the code of the target language before each text that does not begin with one.

    Args:
        tokenizer: any of transformers; the codes are tokens of its source's vocabulary. Where there are none, users'
            own tags (``<2fr>``, ``>>fra<<``) are text like any other.
        language: a language of the codes, such as ``"fra"``, or a code in full; None to put nothing before texts.

    Raises:
        ValueError: the model has no code of this language.
    """

    def __init__(self, tokenizer, language: str | None = None):
        self._tokenizer = tokenizer
        self.default = f"{self.code(language)} " if language else ""

    @cached_property
    def known(self) -> dict[str, str]:
        """Return the codes in the vocabulary by their languages, as in ``{"fra": ">>fra<<"}``.

        In the form `<fr>` two have to be nothing else: beside them `<br>` is Breton, beside `<li>` a tag of HTML.
        """
        source = self._tokenizer.side("source") if hasattr(self._tokenizer, "side") else self._tokenizer
        matches = list(filter(None, map(_TOKEN.fullmatch, sorted(source.get_vocab()))))
        sure = _SURE & {match[4][:2] for match in matches if match[4]}
        return {match[match.lastindex]: match[0] for match in matches if not match[4] or len(sure) > 1}

    def code(self, language: str) -> str:
        """Return the code of a language, which may be in other case, with a hyphen, or a code in full."""
        codes = {code: code for code in self.known.values()} | self.known
        near = {name.lower().replace("_", "-"): code for name, code in codes.items()}
        code = codes.get(language) or near.get(language.lower().replace("_", "-"))
        if code is None and (codes or typed_code(f"{language}.")[1] != "."):
            known = ", ".join(self.known.values()) or "none; give a tag in full as its training text has it, <2fr>"
            raise ValueError(f"{language!r:.40} is no target language of the model: it has {known:.300}")
        return code or language

    def split(self, text: str) -> tuple[str, str]:
        """Return the code of a text, its own or else the one that is set, and the text behind it.

        Raises:
            ValueError: the text begins with a tag, and the model has codes, but not this one.
        """
        own, rest = self._own(text)
        if own and self.known:
            self.code(own.strip())
        return own or self.default, rest

    def coded(self, text: str) -> str:
        """Return a text with its code, which is not checked; blank text stays blank."""
        return text if self._own(text)[0] or not text.strip() else self.default + text

    def _own(self, text: str) -> tuple[str, str]:
        match = _BEGINNING.match(text)
        return typed_code(text, _BEGINNING if match and match[1] in self.known.values() else _TAG)
