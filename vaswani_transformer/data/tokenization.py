"""Shared source/target subword vocabularies, trained with `tokenizers` and saved as stock fast tokenizers.

The paper (section 5.1) encodes English-German with byte-pair encoding, a shared vocabulary of about 37,000 tokens, and
English-French with 32,000 word pieces. Both kinds here work on the bytes of the text in Unicode's form NFC, so that
every Unicode text can be encoded without an unknown token and decoded to exactly the same text in that form.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from ..errors import UserError, items_of, reading, texts_in
from ..json_and_yaml import read_json
from ..model.tokenization_vaswani import TwoSidedCall

# The position is the id. `<pad>` is not 0 because beam search in transformers takes a pad id of 0 for "none given" and
# fills finished hypotheses with `</s>` instead.
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
SIDES = ("source", "target")
DEFAULT_VOCAB_SIZE = {"bpe": 37_000, "wordpiece": 32_000}

BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Byte-level text consists of 256 printable characters, the last of them U+0143, so this sign (U+203F, undertie) can
# never be text; the usual "##" could: as the text "##a" and as a continuing "a".
_CONTINUING_PREFIX = "‿"
_CONTINUING_BYTES = [_CONTINUING_PREFIX + symbol for symbol in BYTE_ALPHABET]
# WordPiece tries all lengths from every position, so its time grows faster than the square of the length of a "word",
# which may be a whole line where there are no spaces (Chinese, base64). Cutting at this many bytes bounds it.
_MAX_WORD_BYTES = 100
# Words as GPT-2 has them, but marks (vowel signs, accents) and joiners belong to the word, or to the sign, before them.
# No word has letters and punctuation, so no learned piece can spell a special token and take its id.
_LETTERS = r"[\p{L}\p{M}][\p{L}\p{M}\x{180e}\x{200c}\x{200d}]*"
_WORDS = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTERS}| ?\p{{N}}[\p{{N}}\p{{M}}]*| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "bpe",
    vocab_size: int | None = None,
    length: int | None = None,
    show_progress: bool = False,
) -> PreTrainedTokenizerFast:
    """Train a shared vocabulary (paper, section 5.1) and wrap it as a tokenizer that `AutoTokenizer` can load.

    The tokenizer appends `</s>` and prepends nothing; ``decode(..., skip_special_tokens=True)`` gives back the exact
    text in the form NFC, and offsets are those of the text as given. Special tokens written out in a text (``"</s>"``)
    are text. The same texts give the same tokenizer.

    Args:
        texts: Source and target sentences together; read once, lazily. Empty strings are ignored.
        kind: ``"bpe"`` (byte-pair encoding, as for English-German) or ``"wordpiece"`` (as for English-French).
        vocab_size: Number of tokens, special tokens included; default 37,000 for ``"bpe"`` and 32,000 for
            ``"wordpiece"``. The tokenizer has fewer where the texts do not hold so many distinct pieces, and never
            fewer than the special tokens and all bytes: 260, and 516 for ``"wordpiece"``.
        length: Number of texts, only for the progress bars of `tokenizers`, which `show_progress` shows.

    Raises:
        UserError: There is no text.
        KeyError: `kind` is none of these.
    """
    vocab_size = {None: DEFAULT_VOCAB_SIZE[kind]}.get(vocab_size, vocab_size)
    sentences = (text if isinstance(text, str) else texts_in([text])[0] for text in items_of(texts) if text)
    first = next(sentences, None)
    if first is None:
        raise UserError("there is no text to train a tokenizer on: give at least one sentence that is not empty")

    trainer = new_trainer(kind, vocab_size, show_progress)
    learner = new_pipeline(kind, models.BPE() if kind == "bpe" else models.WordPiece())
    learner.train_from_iterator(chain([first], sentences), trainer=trainer, length=length)
    model = learner.model
    if kind == "wordpiece":
        # A new model, because the trainer does not keep these options, in a new pipeline, because `learner` takes the
        # single bytes for special tokens.
        limits = {"max_input_chars_per_word": _MAX_WORD_BYTES, "continuing_subword_prefix": _CONTINUING_PREFIX}
        model = models.WordPiece(learner.get_vocab(), unk_token="<unk>", **limits)
    return finished_tokenizer(new_pipeline(kind, model))


def finished_tokenizer(backend: Tokenizer, **settings) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary begins with our special tokens and which ends each text with `</s>`.

    `settings` are further entries of the tokenizer's configuration.
    """
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    end = ("</s>", SPECIAL_TOKENS.index("</s>"))
    backend.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", special_tokens=[end])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)),
        split_special_tokens=True,  # "</s>" in a text is text; kept in tokenizer_config.json, not in tokenizer.json
        clean_up_tokenization_spaces=False,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
        **settings,
    )


with contextlib.suppress(ImportError):  # without sentencepiece
    from transformers.models.marian import tokenization_marian as marian

    class MarianTokenizer(TwoSidedCall, marian.MarianTokenizer):
        """`MarianTokenizer` of transformers, with two sides as our own tokenizers have them.

        It is taken where no fast tokenizer gives the same ids, and saved under the name that transformers knows. As
        transformers has it, it switches itself to its target's side, which another thread would see.
        """

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


#: Files of a `MarianTokenizer`; the last with two vocabularies.
MARIAN_FILES = ("source.spm", "target.spm", "vocab.json", "target_vocab.json")
#: What tokenizers are made of, beside their configuration.
TOKENIZER_FILES = ("tokenizer.json", "target_tokenizer.json", *MARIAN_FILES)


def refuse_special_files(folder: Path) -> None:
    """Raise `UserError` for a pipe, socket or device among a folder's files, at which reading could block."""
    for path in folder.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} is not a regular file: remove it from the folder")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder; nothing is downloaded, and no code of the folder runs.

    Returns:
        A fast tokenizer, with two sides a `VaswaniTokenizer`; `MarianTokenizer` where the folder names it.

    Raises:
        UserError: The folder does not exist, holds no tokenizer, its files cannot be read as one, it does not end a
            text with its end token, or its package is not installed.
    """
    folder = Path(folder)
    with reading(f"tokenizer folder {folder}"):  # first: AutoTokenizer takes the name of a missing one for the Hub's
        refuse_special_files(folder)
    config = folder / "tokenizer_config.json"
    kind = read_json(config).get("tokenizer_class") if config.exists() else None
    with reading(f"the tokenizer in {folder}"):
        if isinstance(kind, str) and tokenizer_class_from_name(kind) is None:
            raise ValueError(f"transformers has no {kind!r:.100}, and code in a folder is not run")
        if kind == "MarianTokenizer":
            tokenizer = load_marian_tokenizer(folder)
        else:
            # Without trust_remote_code=False, transformers would ask on standard input whether to run code in there.
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            if not isinstance(tokenizer, PreTrainedTokenizerFast):
                raise ValueError(f"{type(tokenizer).__name__} is not a tokenizer of the `tokenizers` library")
        # Many wrong values are found in use alone.
        probes = [side_of(tokenizer, side)(["a b"])["input_ids"][0] for side in SIDES]
        tokenizer.batch_decode(probes[-1:], skip_special_tokens=True)
        if tokenizer.eos_token_id is not None and not all(tokenizer.eos_token_id in ids for ids in probes):
            end = f"end token {tokenizer.eos_token!r}, on which models are trained"
            raise ValueError(f"it does not end texts with its {end}: add it in the post_processor of tokenizer.json")
    return tokenizer


def load_marian_tokenizer(folder: Path):
    """Load the `MarianTokenizer` of a local folder, of its own files only."""
    if missing := [file for file in MARIAN_FILES[:3] if not (folder / file).is_file()]:
        raise UserError(f"the MarianTokenizer in {folder} lacks {', '.join(missing)}: copy the whole folder")
    package = "needs the package sentencepiece: pip install 'vaswani_transformer[sentencepiece]'"
    with reading(f"the MarianTokenizer in {folder} {package}"):
        __import__("sentencepiece")
    with reading(folder):  # "</s>" in a text is text, as for our own tokenizers
        return MarianTokenizer.from_pretrained(str(folder), local_files_only=True, split_special_tokens=True)


def has_two_sides(tokenizer: Any) -> bool:
    """Return whether a tokenizer encodes targets (``text_target=``) otherwise than sources."""
    return hasattr(tokenizer, "side")


def side_of(tokenizer: Any, side: str) -> Any:
    """Return the tokenizer for the `"source"` or `"target"` alone: the same for both, unless it has two sides."""
    return tokenizer.side(side) if has_two_sides(tokenizer) else tokenizer


def encoder(tokenizer: PreTrainedTokenizerBase, side: str) -> Callable[[Sequence[str]], list[list[int]]]:
    """Return a function from texts of the `"source"` or `"target"` to their ids, for several threads at once."""
    tokenizer = side_of(tokenizer, side)
    if not tokenizer.is_fast:
        return lambda texts: tokenizer(list(texts), verbose=False)["input_ids"]
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy: these options change it
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    if not has_two_sides(tokenizer):
        return lambda texts: [encoding.ids for encoding in backend.encode_batch_fast(texts)]
    return lambda texts: [
        tokenizer.known_ids(encoding.ids) for encoding in backend.encode_batch_fast(tokenizer.rewritten(texts))
    ]


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of all that decides what a tokenizer does; the same for a copy in another folder.

    The padding and truncation of earlier calls are left out.
    """
    if tokenizer.is_fast:
        views = [side_of(tokenizer, side) for side in (SIDES if has_two_sides(tokenizer) else SIDES[:1])]
        sides = [json.loads(view.backend_tokenizer.to_str()) | {"padding": None, "truncation": None} for view in views]
        state = sides[0]
        if has_two_sides(tokenizer):
            state = {"sides": sides, "known_tokens": tokenizer.known_tokens and list(tokenizer.known_tokens)}
    else:
        state = tokenizer.state()
    special = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "pad", "eos", "unk")]
    facts = [state, special, bool(tokenizer.split_special_tokens)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def vocabulary_sizes(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return how many ids, from 0, sources and targets take."""
    sides = [side_of(tokenizer, name) for name in SIDES]
    return tuple(max(len(side), 1 + max(side.get_vocab().values(), default=0)) for side in sides)  # may have gaps


def check_tokenizer_matches(tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Check that a model can take every id of a tokenizer and gives the special ids the same meaning.

    A model may have more ids than the tokenizer has tokens (an embedding rounded up), not fewer.
    """
    faults = []
    in_model = config.vocab_size, getattr(config, "target_vocab_size", config.vocab_size)
    for side, size, limit in zip(SIDES, vocabulary_sizes(tokenizer), in_model, strict=True):
        if size > limit:
            faults.append(f"vocabulary size of the {side} {size} in the tokenizer, {limit} in the model")
    for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
        in_tokenizer, in_model = getattr(tokenizer, name), getattr(config, name)
        # Tokenizers of other toolkits may have no beginning, which `decoder_start_token_id` of the model is.
        if in_tokenizer != in_model and not (name == "bos_token_id" and in_tokenizer is None):
            faults.append(f"{name} {in_tokenizer} in the tokenizer, {in_model} in the model")
    if faults:
        raise UserError(f"tokenizer does not match the model ({'; '.join(faults)}): use the one saved with the model")


def new_trainer(kind: str, vocab_size: int, show_progress: bool) -> trainers.Trainer:
    """Return a trainer of a vocabulary of special tokens, all bytes and learned pieces."""
    options = {"vocab_size": vocab_size, "special_tokens": [*SPECIAL_TOKENS], "show_progress": show_progress}
    if kind == "bpe":
        return trainers.BpeTrainer(**options, initial_alphabet=BYTE_ALPHABET)
    # The trainer numbers continuing symbols in the order of a randomly seeded hash map and breaks ties between merges
    # by these numbers. Listing the symbols here fixes the numbers, so that training is deterministic, and keeps all of
    # them in the vocabulary, so that no byte is ever unknown.
    options["special_tokens"] += BYTE_ALPHABET + _CONTINUING_BYTES
    return trainers.WordPieceTrainer(**options, continuing_subword_prefix=_CONTINUING_PREFIX)


def new_pipeline(kind: str, model: models.Model, words: str = _WORDS) -> Tokenizer:
    """Build the text pipeline around `model`: text to byte-level words (a pattern), and pieces back to text."""
    tokenizer = Tokenizer(model)
    # One space always, even before a space, so that the first word of a sentence shares its token with the same word
    # elsewhere and the decoder may take exactly one space away. `add_prefix_space` adds it only where there is none.
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words_to_bytes = [pre_tokenizers.Split(Regex(words), "isolated"), to_bytes]
    to_text = [decoders.ByteLevel(), decoders.Strip(" ", left=1, right=0)]
    if kind == "wordpiece":
        words_to_bytes.append(pre_tokenizers.Split(Regex(f".{{1,{_MAX_WORD_BYTES}}}"), "isolated"))
        # Not decoders.WordPiece: it puts a space before every piece without the prefix.
        to_text.insert(0, decoders.Replace(_CONTINUING_PREFIX, ""))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words_to_bytes)
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer
