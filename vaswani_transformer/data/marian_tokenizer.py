"""`MarianTokenizer` of transformers, with two sides as our own tokenizers have them.

It is taken where no fast tokenizer gives the same ids. As transformers has it, it switches itself to its target's side,
which another thread would see. It is saved under the name that transformers knows.
"""

import hashlib
from pathlib import Path
from typing import Any

from ..errors import UserError, reading
from ..model.tokenization_vaswani import TwoSidedCall

#: Files of its folder; the last with two vocabularies.
MARIAN_FILES = ("source.spm", "target.spm", "vocab.json", "target_vocab.json")

try:
    from transformers.models.marian import tokenization_marian as marian
except ImportError:  # without sentencepiece
    pass
else:

    class MarianTokenizer(TwoSidedCall, marian.MarianTokenizer):
        """SentencePiece and a dictionary, for both sides."""

        def side(self, name: str):
            """Return a tokenizer of the same class for ``"source"`` or ``"target"`` alone."""
            view = object.__new__(type(self))
            view.__dict__.update(self.__dict__)
            if name == "target":
                view.spm_source = view.current_spm = view.spm_target
                view.spm_files = view.spm_files[1:] * 2  # which a copy reads
                if view.separate_vocabs:
                    view.encoder = view.current_encoder = view.target_encoder
                view._update_total_vocab_size()  # else its length is the source's
            return view

        def state(self) -> dict[str, Any]:
            """Return all that decides the ids."""
            models = [model.serialized_model_proto() for model in (self.spm_source, self.spm_target)]
            return {
                "vocabularies": [self.encoder, self.target_encoder if self.separate_vocabs else self.encoder],
                "models": [hashlib.sha256(model).hexdigest() for model in models],
            }


def load_marian_tokenizer(folder: Path):
    """Load the `MarianTokenizer` of a local folder, of its own files only."""
    if missing := [file for file in MARIAN_FILES[:3] if not (folder / file).is_file()]:
        raise UserError(f"the MarianTokenizer in {folder} lacks {', '.join(missing)}: copy the whole folder")
    package = "needs the package sentencepiece: pip install 'vaswani_transformer[sentencepiece]'"
    with reading(f"the MarianTokenizer in {folder} {package}"):
        __import__("sentencepiece")
    with reading(folder):  # "</s>" in a text is text, as for our own tokenizers
        return MarianTokenizer.from_pretrained(str(folder), local_files_only=True, split_special_tokens=True)
