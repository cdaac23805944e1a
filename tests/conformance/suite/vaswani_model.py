"""transformers' common tests of models, configurations and training over `vaswani_transformer`."""

import unittest

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel

from .generation.test_utils import GenerationTesterMixin
from .seq2seq import ConfigurationTests, Seq2SeqTester, Seq2SeqTrainingBatch, add_model_names
from .test_modeling_common import ModelTesterMixin
from .test_training_mixin import TrainingTesterMixin

add_model_names("vaswani", VaswaniModel, VaswaniForConditionalGeneration)


def new_tester(**settings) -> Seq2SeqTester:
    return Seq2SeqTester(VaswaniConfig, VaswaniForConditionalGeneration, d_ff=48, num_heads=4, **settings)


class VaswaniModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (VaswaniModel, VaswaniForConditionalGeneration)
    is_encoder_decoder = True
    # Models that are older than 2023, or whose file bears no year, are let off this test unless they ask for it.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = new_tester()


class VaswaniVariantTest(VaswaniModelTest):
    """The same with everything that the paper's base model has not: other heads, positions, biases, three matrices."""

    def setUp(self):
        self.model_tester = new_tester(
            position_encoding="learned", tie_word_embeddings=False, attention_bias=True, d_k=12, d_v=20
        )


class VaswaniImportedTest(VaswaniModelTest):
    """The same with what models of other toolkits have and the paper's has not."""

    def setUp(self):
        self.model_tester = new_tester(
            activation_function="silu",
            output_bias=True,
            attention_bias=True,
            add_final_layer_norm=True,
            share_encoder_decoder_embeddings=False,
            position_encoding="sinusoidal-tensor2tensor",
            position_offset=2,
        )


class VaswaniConfigurationTest(ConfigurationTests, unittest.TestCase):
    def setUp(self):
        self.model_tester = new_tester()


class VaswaniTrainingTest(Seq2SeqTrainingBatch, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (VaswaniForConditionalGeneration,)
    model_tester = new_tester()
