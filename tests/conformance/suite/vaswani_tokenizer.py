"""transformers' tests of the tokenizers backend over tokenizers that `train_tokenizer` makes, of both kinds.

Upstream runs these on tokenizers of the Hub; ours are trained on the spot and loaded from a folder. Besides the mixin
its file has round trips over 18 named tokenizers of the Hub, which are no tests of ours and need the network.
"""

import tempfile
import unittest

from transformers import PreTrainedTokenizerFast

from vaswani_transformer import train_tokenizer

from .test_tokenizers_backend_mixin import TokenizersBackendTesterMixin

TEXTS = (
    "Wonderful! There is no inspiration like an example with a subtoken.",
    "Along with an awesome pair, an amazing example is full of inspiration.",
    "Hello world, this is the first sentence and this is the second one.",
)


class _TokenizerTests(TokenizersBackendTesterMixin):
    kind = ""
    tokenizer_class = PreTrainedTokenizerFast

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.from_pretrained_id = cls.folder.name
        train_tokenizer(TEXTS * 3, kind=cls.kind, vocab_size=700).save_pretrained(cls.folder.name)
        super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.cleanup()


class VaswaniBytePairTest(_TokenizerTests, unittest.TestCase):
    kind = "bpe"


class VaswaniWordPieceTest(_TokenizerTests, unittest.TestCase):
    kind = "wordpiece"
