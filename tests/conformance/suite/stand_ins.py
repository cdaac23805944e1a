"""Stands where upstream has three files of its tests, which the source distribution leaves out.

`ModelTesterMixin` asks whether a tester of a model with `generate` inherits the first class, and inherits the second;
nothing takes the place of upstream's tests in them: ours are in `tests/model/test_generation.py` and
`tests/model/test_huggingface.py`. `ConfigTester` takes the table: fields of `PreTrainedConfig` in transformers 5 that
every configuration accepts, none with its default value (upstream's may hold others).
"""


class GenerationTesterMixin:
    """No tests: see above."""


class ExportTesterMixin:
    """No tests: see above."""


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
