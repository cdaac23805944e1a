"""The parser's tokenizer: byte-pair encoding of words, and one token for each bracket and tag of trees.

A sentence is its words separated by spaces, a tree its tokens (`linearize`) separated by spaces. The vocabulary is
shared, as in Section 6.3; the token of a bracket is never a word, since words of trees hold no round brackets.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence

from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.tokenization import finished_tokenizer, new_pipeline, new_trainer
from ..errors import UserError
from .trees import TREE_TOKENS, escape

SPACE = "Ġ"  # the space before a word, in the byte-level alphabet
_WORDS = " ?[^ ]+"


def sentence_text(words: Iterable[str]) -> str:
    """Return the model's input for the words of a sentence, escaped or not.

    Round brackets are escaped as in trees; white space within a word, which would split it, becomes `_`. Characters
    are composed, as by the tokenizer.
    """
    return unicodedata.normalize("NFC", " ".join(re.sub(r"\s", "_", escape(word)) for word in words))


def train_parser_tokenizer(
    sentences: Iterable[str], tree_tokens: Sequence[str], vocab_size: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer that `AutoTokenizer` can load on lines of `sentence_text`; each bracket and tag is one token.

    The vocabulary is smaller than `vocab_size` for few distinct pieces, and always has all bytes, brackets and tags.
    """
    learner = new_pipeline("bpe", models.BPE(), _WORDS)
    trainer = new_trainer("bpe", max(0, vocab_size - len(tree_tokens)), show_progress=False)
    learner.train_from_iterator(sentences, trainer=trainer)
    learned = json.loads(learner.to_str())["model"]
    vocabulary = learned["vocab"]
    for token in tree_tokens:
        vocabulary.setdefault(_name(token), len(vocabulary))
    merges = [tuple(pair) for pair in learned["merges"]]
    # With ignore_merges a word of the vocabulary is one token; brackets and tags have no merges.
    backend = new_pipeline("bpe", models.BPE(vocabulary, merges, ignore_merges=True), _WORDS)
    return finished_tokenizer(backend, **{TREE_TOKENS: list(tree_tokens)})


def tree_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the id of each bracket and tag; `UserError` for the tokenizer of a model that is not a parser."""
    tokens = tokenizer.init_kwargs.get(TREE_TOKENS)
    vocabulary = tokenizer.get_vocab()
    if not isinstance(tokens, list) or not tokens or any(_name(str(token)) not in vocabulary for token in tokens):
        reason = "its tokenizer_config.json does not name the brackets and tags of trees"
        raise UserError(f"the model is not a parser: {reason}; give a model of `vaswani parse train`")
    return {token: vocabulary[_name(token)] for token in tokens}


def _name(token: str) -> str:
    """Return a bracket or tag as a vocabulary of bytes has it, with the space before it."""
    return pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False).pre_tokenize_str(token)[0][0]
