"""`MarianTokenizer` and `FSMTTokenizer` of transformers, with two sides as our own tokenizers have them.

They are taken where no fast tokenizer gives the same ids. As transformers has them, `MarianTokenizer` switches itself
to its target's side, which another thread would see, and `FSMTTokenizer` encodes targets as sources. Both are saved
under the names that transformers knows.
"""

import hashlib
from pathlib import Path
from typing import Any

from transformers.models.fsmt import tokenization_fsmt as fsmt

from ..errors import UserError, reading
from ..model.tokenization_vaswani import TwoSidedCall

try:
    from transformers.models.marian.tokenization_marian import MarianTokenizer as _StockMarianTokenizer
except ImportError:  # without sentencepiece
    _StockMarianTokenizer = None


class _TwoSides(TwoSidedCall):
    """`side`, and targets encoded by it."""

    def side(self, name: str):
        """Return a tokenizer of the same class for ``"source"`` or ``"target"`` alone."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        if name == "target":
            view._become_target()
            view._update_total_vocab_size()  # else its length is the source's
        return view


class FSMTTokenizer(_TwoSides, fsmt.FSMTTokenizer):
    """Moses' tokenizer and byte-pair encoding, for both sides."""

    def __init__(self, *args, sep_token="</s>", eos_token=None, **kwargs):
        # transformers calls it the separator alone.
        super().__init__(*args, sep_token=sep_token, eos_token=sep_token if eos_token is None else eos_token, **kwargs)

    def _become_target(self) -> None:
        self.src_lang, self.encoder = self.tgt_lang, {token: number for number, token in self.decoder.items()}

    def state(self) -> dict[str, Any]:
        """Return all that decides the ids."""
        return {
            "languages": [self.src_lang, self.tgt_lang],
            "vocabularies": [self.encoder, {token: number for number, token in self.decoder.items()}],
            "merges": list(self.bpe_ranks),
            "lower case": self.do_lower_case,
        }


if _StockMarianTokenizer is not None:

    class MarianTokenizer(_TwoSides, _StockMarianTokenizer):
        """SentencePiece and a dictionary, for both sides."""

        def _become_target(self) -> None:
            self.spm_source = self.current_spm = self.spm_target
            self.spm_files = self.spm_files[1:] * 2  # which a copy reads
            if self.separate_vocabs:
                self.encoder = self.current_encoder = self.target_encoder

        def state(self) -> dict[str, Any]:
            """Return all that decides the ids."""
            models = [model.serialized_model_proto() for model in (self.spm_source, self.spm_target)]
            return {
                "vocabularies": [self.encoder, self.target_encoder if self.separate_vocabs else self.encoder],
                "models": [hashlib.sha256(model).hexdigest() for model in models],
            }


# By the name in tokenizer_config.json: files, and what must be installed.
SLOW_FILES = {
    "MarianTokenizer": ("source.spm", "target.spm", "vocab.json", "target_vocab.json"),  # the last with two of them
    "FSMTTokenizer": ("vocab-src.json", "vocab-tgt.json", "merges.txt"),
}
_PACKAGES = {"MarianTokenizer": ("sentencepiece", "sentencepiece"), "FSMTTokenizer": ("sacremoses", "moses")}


def load_slow_tokenizer(folder: Path, name: str):
    """Load the tokenizer of one of these classes from a local folder, of its own files only."""
    if missing := [file for file in SLOW_FILES[name][:3] if not (folder / file).is_file()]:
        raise UserError(f"the {name} in {folder} lacks {', '.join(missing)}: copy the whole folder")
    package, extra = _PACKAGES[name]
    with reading(f"the {name} in {folder} needs the package {package}: pip install 'vaswani_transformer[{extra}]'"):
        __import__(package)
    with reading(folder):  # "</s>" in a text is text, as for our own tokenizers
        return globals()[name].from_pretrained(str(folder), local_files_only=True, split_special_tokens=True)
