"""Stands where upstream has `tests/utils/test_configuration_utils.py`, which the source distribution leaves out.

`ConfigTester` takes from it one table: arguments that every configuration accepts, none with its default value. This
one lists the fields of `PreTrainedConfig` in transformers 5 (upstream's table may hold others).
"""

config_common_kwargs = {
    "architectures": ["SomeModel"],
    "chunk_size_feed_forward": 3,
    "dtype": "float16",
    "id2label": {0: "no", 1: "yes", 2: "maybe"},
    "is_encoder_decoder": True,
    "label2id": {"no": 0, "yes": 1, "maybe": 2},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}
