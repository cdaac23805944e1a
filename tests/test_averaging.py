"""Averages of checkpoints: exact in float64, and errors for what is not of one model."""

import pytest
import torch
from safetensors.torch import save_file

from vaswani_transformer import VaswaniConfig, VaswaniForConditionalGeneration
from vaswani_transformer.averaging import average_checkpoints
from vaswani_transformer.errors import UserError


def write(folder, weights):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_all(folder, checkpoints):
    return [write(folder / f"checkpoint-{index}", weights) for index, weights in enumerate(checkpoints)]


def test_by_hand(tmp_path):
    checkpoints = [{"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[-4.0]])}, {"a": torch.zeros(2)}]
    checkpoints[1]["b"] = torch.tensor([[1.0]])
    averaged = average_checkpoints(write_all(tmp_path, checkpoints))
    assert averaged.keys() == {"a", "b"}
    assert averaged["a"].tolist() == [0.5, 1.0]
    assert averaged["b"].tolist() == [[-1.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("number", [1, 3, 5, 20])
def test_is_the_mean_of_float64_rounded_once(tmp_path, dtype, number):
    generator = torch.Generator().manual_seed(number)
    checkpoints = [{"w": (torch.randn(7, 5, generator=generator) * 3).to(dtype)} for _ in range(number)]
    averaged = average_checkpoints(write_all(tmp_path, checkpoints))["w"]
    exact = sum(weights["w"].double() for weights in checkpoints) / number
    assert averaged.dtype == dtype
    assert torch.equal(averaged, exact.to(dtype))
    if number == 1:
        assert torch.equal(averaged, checkpoints[0]["w"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sum_is_not_kept_in_the_type_of_storage(tmp_path, dtype):
    """In bf16 256 + 1 is 256, and in fp16 the sum of these overflows."""
    large = 256.0 if dtype == torch.bfloat16 else 40_000.0
    values = [large, 1.0, 1.0, large]
    averaged = average_checkpoints(write_all(tmp_path, [{"w": torch.tensor([value], dtype=dtype)} for value in values]))
    assert averaged["w"].double().item() == torch.tensor(sum(values) / 4).to(dtype).double().item()


def test_small_differences_survive(tmp_path):
    """In float32 the sum of 1e8 and 1 loses the 1."""
    values = [1e8, 1.0, 1.0, 1.0, -1e8, 1.0]
    averaged = average_checkpoints(write_all(tmp_path, [{"w": torch.tensor([value])} for value in values]))
    assert averaged["w"].item() == torch.tensor(4 / 6).item()


def test_type_is_that_of_the_first(tmp_path):
    checkpoints = [{"w": torch.ones(2, dtype=torch.bfloat16)}, {"w": torch.zeros(2)}]
    averaged = average_checkpoints(write_all(tmp_path, checkpoints))["w"]
    assert averaged.dtype == torch.bfloat16
    assert averaged.tolist() == [0.5, 0.5]


def test_paths_may_be_text(tmp_path):
    folders = write_all(tmp_path, [{"w": torch.ones(2)}, {"w": torch.zeros(2)}])
    assert average_checkpoints([str(folder) for folder in folders])["w"].tolist() == [0.5, 0.5]


def check_error(folders, *parts):
    with pytest.raises(UserError) as caught:
        average_checkpoints(folders)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_no_checkpoints():
    check_error([], "no checkpoints to average")


def test_missing_file(tmp_path):
    folder = write(tmp_path / "whole", {"w": torch.ones(2)})
    (tmp_path / "empty").mkdir()
    check_error([folder, tmp_path / "empty"], str(tmp_path / "empty"), "model.safetensors")
    check_error([tmp_path / "nowhere"], str(tmp_path / "nowhere"))


def test_other_names(tmp_path):
    folders = write_all(tmp_path, [{"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2)}])
    check_error(folders, str(folders[1]), "only one has the weight b")
    check_error(folders[::-1], str(folders[0]), "only one has the weight b")


def test_other_shapes(tmp_path):
    folders = write_all(tmp_path, [{"w": torch.ones(2)}, {"w": torch.ones(2)}, {"w": torch.ones(3)}])
    check_error(folders, "w has shape (3,)", str(folders[2]), "(2,)", "only checkpoints of one model")
    # Shapes that torch would broadcast are still not of one model.
    check_error(
        [write(tmp_path / "wide", {"w": torch.ones(2, 3)}), write(tmp_path / "row", {"w": torch.ones(1, 3)})],
        "(1, 3)",
        "(2, 3)",
    )


def make_model(seed, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 30, "d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    return VaswaniForConditionalGeneration(VaswaniConfig(**sizes, dropout=0.0, **changes)).eval()


def is_tied(model):
    matrices = model.lm_head.weight, model.model.encoder.embed_tokens.weight, model.model.decoder.embed_tokens.weight
    return len({matrix.data_ptr() for matrix in matrices}) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_average_of_models(tmp_path, tied):
    models = [make_model(seed, tie_word_embeddings=tied) for seed in range(3)]
    for index, model in enumerate(models):
        model.save_pretrained(tmp_path / str(index))
    averaged = average_checkpoints([tmp_path / str(index) for index in range(3)])
    assert averaged.keys() <= models[0].state_dict().keys()
    model = make_model(9, tie_word_embeddings=tied)
    missing = model.load_state_dict(averaged, strict=False)  # as a training run does
    model.tie_weights()
    assert not missing.unexpected_keys
    assert is_tied(model) is tied
    for name, parameter in model.named_parameters():
        exact = sum(dict(other.named_parameters())[name].double() for other in models) / 3
        assert torch.equal(parameter, exact.float()), name

    model.save_pretrained(tmp_path / "average")
    loaded = VaswaniForConditionalGeneration.from_pretrained(tmp_path / "average").eval()
    assert is_tied(loaded) is tied
    inputs = model.dummy_inputs
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)


def test_average_of_one_is_the_model_itself(tmp_path):
    model = make_model(0)
    model.save_pretrained(tmp_path / "one")
    other = make_model(1)
    other.load_state_dict(average_checkpoints([tmp_path / "one"] * 3), strict=False)
    other.tie_weights()
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
