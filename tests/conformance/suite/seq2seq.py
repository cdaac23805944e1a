"""What the common tests ask of a tester, for any encoder-decoder model: configurations, inputs, and lists of tests."""

import torch
from parameterized import parameterized
from transformers import PreTrainedConfig
from transformers.testing_utils import torch_device

from .test_configuration_common import ConfigTester

# The common tests run on one small input at a time: more threads only wait for one another.
torch.set_num_threads(1)


class Seq2SeqTester:
    """Sizes and inputs; a model gives its configuration class, its classes, and what its configuration calls things."""

    batch_size, is_training = 13, True
    seq_length = encoder_seq_length = decoder_seq_length = 7
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 32
    vocab_size, pad_token_id, eos_token_id, start_token_id = 99, 1, 2, 3

    def __init__(self, config_class: type[PreTrainedConfig], trained_class: type, **settings):
        self.config_class, self.settings = config_class, settings
        self.causal_lm_class = trained_class  # the name by which the training mixin asks for the class to train

    def get_config(self) -> PreTrainedConfig:
        """A configuration of a few thousand parameters, with dropout as in the paper."""
        return self.config_class(
            vocab_size=self.vocab_size,
            d_model=self.hidden_size,
            encoder_layers=self.num_hidden_layers,
            decoder_layers=self.num_hidden_layers,
            dropout=0.1,
            max_position_embeddings=80,
            pad_token_id=self.pad_token_id,
            eos_token_id=self.eos_token_id,
            bos_token_id=0,
            decoder_start_token_id=self.start_token_id,
            **self.settings,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        """The configuration and a batch of sentences without padding (some tests add their own)."""
        shape = (self.batch_size, self.seq_length)
        input_ids = torch.randint(self.start_token_id + 1, self.vocab_size, shape, device=torch_device)
        input_ids[:, -1] = self.eos_token_id
        decoder_input_ids = torch.randint(self.start_token_id + 1, self.vocab_size, shape, device=torch_device)
        decoder_input_ids[:, 0] = self.start_token_id
        return self.get_config(), {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": torch.ones_like(decoder_input_ids),
        }


class Seq2SeqTrainingBatch:
    """The batch that the training mixin overfits, for an encoder-decoder.

    The mixin's own is a language model's: labels equal to the inputs, and given the first token alone the model must
    generate the whole row of inputs. The output of an encoder-decoder begins with its start token, which is no label,
    so with that batch this can hold for none. Here the row begins with the start token, the labels are what follows,
    and the mask leaves of the source what the test gives to `generate`: the first token. The test itself is unchanged.
    """

    def _create_text_training_batch(self, batch_size: int, seq_length: int, vocab_size: int) -> dict[str, torch.Tensor]:
        start = self.model_tester.start_token_id
        row = start + torch.arange(seq_length + 1) % (min(20, vocab_size) - start)
        rows = row.repeat(batch_size, 1)
        source = rows[:, :-1].clone()
        first_only = torch.zeros_like(source)
        first_only[:, 0] = 1
        return {"input_ids": source, "attention_mask": first_only, "labels": rows[:, 1:].clone()}


class ConfigurationTests:
    """Every check of `ConfigTester` as a test of its own."""

    checks = sorted(name for name in dir(ConfigTester) if name.startswith(("create_and_test_", "check_")))

    @parameterized.expand(checks)
    def test_config(self, name):
        tester = ConfigTester(self, config_class=self.model_tester.config_class, d_model=self.model_tester.hidden_size)
        getattr(tester, name)()


def add_model_names(model_type: str, base_class: type, seq2seq_class: type) -> None:
    """Put a model's class names where the common tests look for them.

    They ask transformers' private tables of names which classes take labels. `AutoModel.register` fills the public
    tables of classes only, so without this the tests would ask the bare model for a loss.
    """
    from transformers.models.auto import modeling_auto

    modeling_auto.MODEL_MAPPING_NAMES[model_type] = base_class.__name__
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[model_type] = seq2seq_class.__name__
