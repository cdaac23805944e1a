"""The same tests over transformers' own Marian, the nearest relative: the measure of what applies on a machine."""

import unittest

from transformers import MarianConfig, MarianModel, MarianMTModel

from .generation.test_utils import GenerationTesterMixin
from .seq2seq import ConfigurationTests, Seq2SeqTester
from .test_modeling_common import ModelTesterMixin


def new_tester() -> Seq2SeqTester:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return Seq2SeqTester(MarianConfig, MarianMTModel, encoder_ffn_dim=48, decoder_ffn_dim=48, **heads)


class MarianModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (MarianModel, MarianMTModel)
    is_encoder_decoder = True

    def setUp(self):
        self.model_tester = new_tester()


class MarianConfigurationTest(ConfigurationTests, unittest.TestCase):
    def setUp(self):
        self.model_tester = new_tester()
