"""Tables of weights of `torch.nn.Transformer`, by a mapping: the logits of torch's own model; a line for mistakes."""

import math
import re
import warnings

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn

from vaswani_transformer import UserError, VaswaniForConditionalGeneration, import_model, load_model
from vaswani_transformer.importing.source import ImportOptions
from vaswani_transformer.importing.torch_transformer import is_one, read

PAD, BOS, EOS, UNK = 1, 2, 3, 0
WORDS = ["<unk>", "<pad>", "<bos>", "<eos>", "ein", "Haus", "the", "house", "Hund", "dog", "runs"]


def sinusoids(rows: int, d_model: int, dtype=torch.float32) -> torch.Tensor:
    """As tutorials compute them."""
    frequencies = torch.exp(torch.arange(0, d_model, 2, dtype=dtype) * (-math.log(10_000) / d_model))
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


class Tutorial(nn.Module):
    """A model around `torch.nn.Transformer`, with the names of PyTorch's tutorial on translation."""

    def __init__(
        self, source_size=13, target_size=11, d_model=12, heads=3, d_ff=20, layers=(2, 1), positions="buffer",
        shared=False, tied=False, output_bias=True, scale=True, rows=40, **settings,
    ):  # fmt: skip
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an odd number of heads
            self.transformer = nn.Transformer(d_model, heads, *layers, d_ff, 0.0, batch_first=True, **settings)
        self.src_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(source_size, d_model)})
        embedding = self.src_tok_emb["embedding"] if shared else nn.Embedding(target_size, d_model)
        self.tgt_tok_emb = nn.ModuleDict({"embedding": embedding})
        self.generator = nn.Linear(d_model, embedding.num_embeddings, bias=output_bias)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        if tied:
            self.generator.weight = embedding.weight
        self.scale = math.sqrt(d_model) if scale else 1.0
        self.positional_encoding = nn.Module()
        if positions == "buffer":
            self.positional_encoding.register_buffer("pos_embedding", sinusoids(rows, d_model)[:, None])
        elif positions == "one table":
            self.positional_encoding.pos_embedding = nn.Parameter(torch.randn(1, rows, d_model))
        else:
            self.positions = nn.ModuleList(nn.Embedding(rows, d_model) for _ in range(2))

    def embed(self, ids, side):
        embedding = (self.src_tok_emb, self.tgt_tok_emb)[side]["embedding"]
        if hasattr(self, "positions"):
            table = self.positions[side].weight
        else:
            table = self.positional_encoding.pos_embedding.flatten(0, 1)
        return embedding(ids) * self.scale + table[: ids.shape[1]]

    def forward(self, source, target):
        padding = source == PAD
        length = target.shape[1]
        hidden = self.transformer(
            self.embed(source, 0),
            self.embed(target, 1),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.generator(hidden)


def mapping(**changes) -> dict:
    """That of `Tutorial`; None takes a key away."""
    keys = {
        "prefix": "transformer.",
        "source_embedding": "src_tok_emb.embedding",
        "target_embedding": "tgt_tok_emb.embedding.weight",
        "output": "generator",
        "num_heads": 3,
        "position_encoding": "sinusoidal",
        "special_tokens": {"pad": PAD, "bos": BOS, "eos": EOS},
    }
    return {key: value for key, value in {**keys, **changes}.items() if value is not None}


def import_table(folder, content, keys, name="model.pt"):
    """What is read from a saved table by a mapping, both written into a folder."""
    (save_file if name.endswith("safetensors") else torch.save)(content, folder / name)
    (folder / "mapping.yaml").write_text(keys if isinstance(keys, str) else yaml.safe_dump(keys), encoding="utf-8")
    assert is_one(folder / name)
    return read(folder / name, ImportOptions(mapping=folder / "mapping.yaml"))


def loaded(imported) -> VaswaniForConditionalGeneration:
    """The imported model, its weights complete and no more than that; sinusoids in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        model = VaswaniForConditionalGeneration(imported.config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    result = model.load_state_dict(imported.weights, strict=False)
    assert not result.unexpected_keys
    assert set(result.missing_keys) <= {"model.shared.weight"}
    return model


def sources(size: int) -> torch.Tensor:
    ids = torch.randint(4, size, (3, 7))
    ids[1, 4:], ids[2, 6:] = PAD, PAD
    return ids


@torch.no_grad()
def greedy(oracle, source, length) -> torch.Tensor:
    """The most probable tokens one by one, without a cache, padded after the end."""
    target = torch.full((len(source), 1), BOS)
    done = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(length):
        token = oracle(source, target)[:, -1].argmax(-1).masked_fill(done, PAD)
        target, done = torch.cat([target, token[:, None]], dim=1), done | (token == EOS)
    return target


@torch.no_grad()
def check_same(oracle, model, dtype=torch.float64, tolerance=1e-12, length=8):
    """The same logits, as a share of the largest, with padding in the source, and the same greedy outputs."""
    # In evaluation mode torch may take a fused path with other roundings; there is no dropout.
    oracle, model = oracle.to(dtype).train(), model.to(dtype)
    source = sources(oracle.src_tok_emb["embedding"].num_embeddings)
    target = torch.randint(4, oracle.generator.out_features, (3, 5))
    expected = oracle(source, target)
    mask = source.ne(PAD).long()
    logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    expected = greedy(oracle, source, length)
    generated = model.generate(source, attention_mask=mask, num_beams=1, do_sample=False, max_new_tokens=length)
    assert generated.tolist() == expected[:, : generated.shape[1]].tolist()
    assert (expected[:, generated.shape[1] :] == PAD).all()


@hypothesis_settings(max_examples=15, derandomize=True)
@given(
    heads=st.integers(1, 3),
    width=st.sampled_from([2, 4]),
    d_ff=st.integers(1, 20),
    layers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    activation=st.sampled_from(["relu", "gelu"]),
    bias=st.booleans(),
    output_bias=st.booleans(),
    shared=st.booleans(),
    tied=st.booleans(),
    scale=st.booleans(),
    positions=st.sampled_from(["buffer", "one table", "two tables"]),
    layer_norm_eps=st.sampled_from([1e-5, 1e-3]),
)
def test_logits_and_greedy_outputs_are_torchs(
    tmp_path_factory, heads, width, d_ff, layers, activation, bias, output_bias, shared, tied, scale, positions,
    layer_norm_eps,
):  # fmt: skip
    torch.manual_seed(0)
    oracle = Tutorial(
        d_model=heads * width, heads=heads, d_ff=d_ff, layers=layers, activation=activation, bias=bias, shared=shared,
        output_bias=output_bias, tied=tied, scale=scale, positions=positions, layer_norm_eps=layer_norm_eps,
    ).double()  # fmt: skip
    if positions == "buffer":
        oracle.positional_encoding.pos_embedding = sinusoids(40, heads * width, torch.float64)[:, None]
    tables = {"one table": "positional_encoding.pos_embedding", "two tables": ["positions.0", "positions.1"]}
    keys = mapping(
        num_heads=heads,
        activation_function=activation,
        layer_norm_eps=layer_norm_eps,
        scale_embedding=scale,
        position_encoding="sinusoidal" if positions == "buffer" else "learned",
        position_tables=tables.get(positions),
    )
    imported = import_table(tmp_path_factory.mktemp("torch"), oracle.state_dict(), keys)
    assert imported.config.tie_word_embeddings == tied
    assert imported.config.share_encoder_decoder_embeddings == shared
    assert imported.config.attention_bias == bias
    check_same(oracle, loaded(imported))


def test_float32_differs_by_roundings_only(tmp_path):
    torch.manual_seed(1)
    oracle = Tutorial(d_model=64, heads=8, d_ff=128, layers=(3, 3), source_size=500, target_size=400)
    imported = import_table(tmp_path, oracle.state_dict(), mapping(num_heads=8))
    check_same(oracle, loaded(imported), torch.float32, tolerance=2e-6, length=20)


OWN_NAMES = """
source_embedding: embed.source
target_embedding: embed.target
output: project
num_heads: 3
position_encoding: sinusoidal
special_tokens: {pad: 1, bos: 2, eos: 3}
encoder_norm: norms.encoder
decoder_norm: norms.decoder
encoder_layers:
  self_attn.q_proj: encoder.blocks.{i}.attention.w_q
  self_attn.k_proj: encoder.blocks.{i}.attention.w_k
  self_attn.v_proj: encoder.blocks.{i}.attention.w_v
  self_attn.out_proj: encoder.blocks.{i}.attention.w_o
  self_attn_layer_norm: encoder.blocks.{i}.attention.norm
  fc1: encoder.blocks.{i}.inner
  fc2: encoder.blocks.{i}.outer
  final_layer_norm: encoder.blocks.{i}.norm
decoder_layers:
  self_attn.in_proj: blocks.{i}.in_proj
  self_attn.out_proj: blocks.{i}.out
  self_attn_layer_norm: blocks.{i}.norms.0
  encoder_attn.q_proj: blocks.{i}.source.w_q
  encoder_attn.k_proj: blocks.{i}.source.w_k
  encoder_attn.v_proj: blocks.{i}.source.w_v
  encoder_attn.out_proj: blocks.{i}.source.w_o
  encoder_attn_layer_norm: blocks.{i}.norms.1
  fc1: blocks.{i}.inner
  fc2: blocks.{i}.outer
  final_layer_norm: blocks.{i}.norms.2
"""


def renamed(oracle: Tutorial) -> dict[str, torch.Tensor]:
    """The weights of `Tutorial` under the names of `OWN_NAMES`."""
    torch_names = {
        "src_tok_emb.embedding": "embed.source", "tgt_tok_emb.embedding": "embed.target", "generator": "project",
        "transformer.encoder.norm": "norms.encoder", "transformer.decoder.norm": "norms.decoder",
        "self_attn.out_proj": "attention.w_o", "multihead_attn.out_proj": "source.w_o",
        "linear1": "inner", "linear2": "outer",
    }  # fmt: skip
    weights = {}
    for name, tensor in oracle.state_dict().items():
        if "pos_embedding" in name:
            continue
        is_encoder = "encoder." in name
        for theirs, own in torch_names.items():
            name = name.replace(theirs, own if is_encoder or theirs != "self_attn.out_proj" else "out")
        if is_encoder:
            name = name.replace("norm1", "attention.norm").replace("norm2", "norm")
        for number in "123":
            name = name.replace(f"norm{number}", f"norms.{int(number) - 1}")
        name = name.replace("transformer.encoder.layers", "encoder.blocks").replace(
            "transformer.decoder.layers", "blocks"
        )
        module, packed, kind = name.rpartition("in_proj_")
        if packed and (is_encoder or "multihead" in name):
            module = module.replace("self_attn", "attention").replace("multihead_attn", "source")
            weights |= {f"{module}w_{x}.{kind}": rows for x, rows in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            weights[name.replace("self_attn.in_proj", "in_proj")] = tensor
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_long_tables_of_sinusoids_are_those_of_the_paper(tmp_path, dtype):
    weights = {**Tutorial().state_dict(), "pe": sinusoids(5000, 256).to(dtype)}
    assert "pe" not in import_table(tmp_path, weights, mapping()).weights
    weights["pe"][1, 0] += 0.01
    with pytest.raises(UserError, match="nothing stands for pe"):
        import_table(tmp_path, weights, mapping())


def test_layers_may_have_names_of_their_own_and_projections_apart(tmp_path):
    torch.manual_seed(2)
    oracle = Tutorial()
    oracle.positional_encoding.pos_embedding = sinusoids(40, 12, torch.float64)[:, None]
    check_same(oracle, loaded(import_table(tmp_path, renamed(oracle), OWN_NAMES)))


@pytest.mark.parametrize("key", [None, "ema"])
def test_the_table_may_lie_in_a_checkpoint(tmp_path, key):
    oracle = Tutorial()
    optimizer = torch.optim.Adam(oracle.parameters())
    oracle(sources(13), sources(11)).sum().backward()
    optimizer.step()
    checkpoint = {"epoch": 3, "loss": 0.5, "optimizer_state_dict": optimizer.state_dict()}
    checkpoint[key or "model_state_dict"] = oracle.state_dict()
    if key:
        checkpoint["model"] = Tutorial().state_dict()
    imported = import_table(tmp_path, checkpoint, mapping(state_dict=key), "last.pth")
    assert torch.equal(imported.weights["lm_head.weight"], oracle.generator.weight)


def test_safetensors_are_read_too(tmp_path):
    oracle = Tutorial()
    imported = import_table(tmp_path, dict(oracle.state_dict()), mapping(), "model.safetensors")
    check_same(oracle, loaded(imported), torch.float32, tolerance=2e-6)


def test_tables_of_another_length_are_cut_with_a_note(tmp_path):
    oracle = Tutorial(positions="two tables")
    weights = oracle.state_dict()
    weights["positions.1.weight"] = weights["positions.1.weight"][:33]
    keys = mapping(position_encoding="learned", position_tables=["positions.0", "positions.1"])
    imported = import_table(tmp_path, weights, keys)
    assert imported.config.max_position_embeddings == 33
    assert "40 and 33" in imported.facts.notes[0]
    loaded(imported)


def without(*parts):
    """The weights of `Tutorial` less those whose name holds one of the parts."""
    return lambda weights: {name: tensor for name, tensor in weights.items() if not any(part in name for part in parts)}


def more(**tensors):
    return lambda weights: {**weights, **tensors}


HALVES = torch.cat((sinusoids(40, 12)[:, ::2], sinusoids(40, 12)[:, 1::2]), dim=1)
LAYERS = yaml.safe_load(OWN_NAMES)["encoder_layers"]


@pytest.mark.parametrize(
    ("keys", "change", "said"),
    [
        (mapping(num_head=3), None, "key 'num_head', which is unknown (the nearest is 'num_heads')"),
        (mapping(output=None, num_heads=None), None, "lacks output, num_heads"),
        (mapping(num_heads=5), None, "num_heads is 5: it must divide the 12 rows"),
        (mapping(num_heads="three"), None, "num_heads in"),
        (mapping(num_heads=0), None, "it must be a whole number, 1 or more"),
        (mapping(position_encoding="rotary"), None, "is 'rotary': it must be one of sinusoidal"),
        (mapping(position_encoding="learned"), None, "position_tables in"),
        (mapping(position_tables=["a"]), None, "with `position_encoding: learned`, and only then"),
        (mapping(activation_function="tanh"), None, "activation_function is 'tanh': it must be one of relu"),
        (mapping(norm_first=True), None, "normalise after each sublayer"),
        (mapping(norm_first="no"), None, "norm_first in"),
        (mapping(layer_norm_eps=2), None, "layer_norm_eps is 2: it must be"),
        (mapping(scale_embedding="yes"), None, "scale_embedding"),
        (mapping(output=["generator"]), None, "output in"),
        (mapping(encoder_layers={"fc1": 3}), None, "lines of the form `name: name`"),
        (mapping(encoder_layers={**LAYERS, "fc3": "x.{i}"}), None, "encoder_layers in"),
        (mapping(encoder_layers={"fc1": "x.{i}"}), None, "lacks fc2, final_layer_norm, self_attn"),
        (mapping(encoder_layers={**LAYERS, "fc1": "x.0"}), None, "it must hold {i}"),
        (mapping(special_tokens={"pad": 1, "bos": 2}), None, "special_tokens in"),
        (mapping(special_tokens={"pad": 1, "bos": 2, "eos": 11}), None, "eos_token_id is 11"),
        (mapping(special_tokens={"pad": 1, "bos": 2, "eos": "</s>"}), None, "give the vocabularies too"),
        (mapping(state_dict="ema"), None, "does not hold a table of tensors 'ema'"),
        (mapping(output="generate"), None, "there is no generate.weight (the nearest is 'generator.weight')"),
        (mapping(prefix=None), None, "(the nearest is 'transformer.encoder.layers.0.self_attn.in_proj_weight')"),
        (mapping(), without("layers.1.linear2.bias"), "there is no transformer.encoder.layers.1.linear2.bias"),
        (mapping(), without("encoder.norm"), "there is no transformer.encoder.norm.weight"),
        (mapping(), more(gate=torch.ones(3)), "nothing stands for gate: correct the names"),
        (mapping(), more(generator=torch.ones(3)), "nothing stands for generator"),
        (mapping(), more(pe=HALVES), "pe (positions of the encoding 'sinusoidal-halves')"),
        (mapping(), more(pe=HALVES[None] * 1.01), "if it holds positions, they are not 'sinusoidal'"),
        (mapping(), more(**{"generator.weight": torch.ones(11)}), "generator.weight in"),
        ("- a\n", None, "has no keys"),
        ("num_heads: [\n", None, "is not valid YAML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_that_names_it(tmp_path, keys, change, said):
    weights = dict(Tutorial().state_dict())
    with pytest.raises(UserError) as caught:
        import_table(tmp_path, change(weights) if change else weights, keys)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_missing_and_left_over_tensor_is_named(tmp_path):
    with pytest.raises(UserError) as caught:
        import_table(tmp_path, {f"model.{name}": t for name, t in Tutorial().state_dict().items()}, mapping())
    missing, left_over = str(caught.value).split("nothing stands for")
    for name in Tutorial().state_dict():
        if "decoder" in name or name.startswith("generator"):  # of one layer, as one names it
            assert f"model.{name}" in left_over
            assert f"{name} (the nearest is 'model.{name}')" in missing or name.endswith("bias") or "coder.norm" in name
    assert "model.transformer.encoder.layers.{0,1}.norm1.weight" in left_over


def test_what_is_not_needed_may_be_ignored(tmp_path):
    weights = {**Tutorial().state_dict(), "gate": torch.ones(3)}
    assert "gate" not in import_table(tmp_path, weights, mapping(ignored="gate")).weights


@pytest.mark.parametrize("bos_before_source", [None, False])
def test_lists_of_words_make_a_tokenizer(tmp_path, bos_before_source):
    (tmp_path / "de.txt").write_text("\n".join([*WORDS, "Katze", "läuft"]) + "\n", encoding="utf-8")
    (tmp_path / "en.txt").write_text("\n".join(WORDS[:11]), encoding="utf-8")
    special = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
    keys = mapping(special_tokens=special, vocabularies=["de.txt", "en.txt"], bos_before_source=bos_before_source)
    imported = import_table(tmp_path, Tutorial().state_dict(), keys)
    config, tokenizer = imported.config, imported.tokenizer
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id) == (
        1,
        2,
        3,
        2,
    )
    before = [BOS] if bos_before_source is None else []
    assert tokenizer(["ein Hund läuft", "x"])["input_ids"] == [[*before, 4, 8, 12, EOS], [*before, UNK, EOS]]
    assert tokenizer(text_target=["the dog  läuft"])["input_ids"] == [[6, 9, UNK, EOS]]
    assert tokenizer.decode([BOS, 6, 9, 10, EOS, PAD], skip_special_tokens=True) == "the dog runs"


def test_a_tokenizer_of_the_library_may_serve_both_sides(tmp_path):
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[a-zA-Z]+"), "removed", invert=True)
    (tmp_path / "words").mkdir()
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    keys = mapping(special_tokens={"pad": 1, "bos": 2, "eos": 3}, vocabularies="words")
    tokenizer = import_table(tmp_path, Tutorial(source_size=11, target_size=16).state_dict(), keys).tokenizer
    assert tokenizer("ein-Hund!").input_ids == [BOS, 4, 8, EOS]
    assert tokenizer(text_target="dog").input_ids == [9, EOS]


@pytest.mark.parametrize(
    ("words", "special", "said"),
    [
        (WORDS[:-1], "<eos>", "has 10 lines and the embedding 11 rows"),
        ([*WORDS[:-1], "ein"], "<eos>", "has 'ein' on lines 5 and 11"),
        (WORDS, "</s>", "special_tokens has eos: '</s>', and"),
        (["<pad>", "<unk>", *WORDS[2:]], "<eos>", "b.txt has '<pad>' with id 0: it must have the same id"),
        (None, "<eos>", "there is no vocabulary"),
        (["[unk]", *WORDS[1:]], "<eos>", "a list of words without '<unk>'"),
    ],
)
def test_vocabularies_that_do_not_fit_are_one_line(tmp_path, words, special, said):
    (tmp_path / "a.txt").write_text("\n".join(WORDS), encoding="utf-8")
    if words:
        (tmp_path / "b.txt").write_text("\n".join(words), encoding="utf-8")
    names = {"pad": "<pad>", "bos": "<bos>", "eos": special, "unk": "<unk>"}
    keys = mapping(special_tokens=names, vocabularies=["a.txt", "b.txt"])
    with pytest.raises(UserError, match=re.escape(said)):
        import_table(tmp_path, Tutorial(source_size=11).state_dict(), keys)


@pytest.mark.parametrize(
    ("content", "said"),
    [(torch.ones(3), "save model"), ({}, "save model"), ({"w": 3}, "save model"), ({"w": print}, "could run code")],
)
def test_files_without_a_table_are_one_line(tmp_path, content, said):
    with pytest.raises(UserError, match=said):
        import_table(tmp_path, content, mapping())


def test_a_mapping_must_be_given(tmp_path):
    torch.save(Tutorial().state_dict(), tmp_path / "model.pt")
    with pytest.raises(UserError, match="give it as --mapping"):
        read(tmp_path / "model.pt", ImportOptions())
    with pytest.raises(UserError, match="there is no mapping file"):
        read(tmp_path / "model.pt", ImportOptions(mapping=tmp_path / "none.yaml"))


def test_an_imported_folder_translates_as_torch_does(tmp_path):
    torch.manual_seed(4)
    oracle = Tutorial().train()  # not torch's fused path
    torch.save(oracle.state_dict(), tmp_path / "model.pt")
    (tmp_path / "de.txt").write_text("\n".join([*WORDS, "Katze", "läuft"]), encoding="utf-8")
    (tmp_path / "en.txt").write_text("\n".join(WORDS), encoding="utf-8")
    special = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
    keys = mapping(special_tokens=special, vocabularies=["de.txt", "en.txt"])
    (tmp_path / "mapping.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    import_model(tmp_path / "model.pt", tmp_path / "out", mapping=tmp_path / "mapping.yaml")
    model, tokenizer = load_model(tmp_path / "out", "cpu")
    batch = tokenizer(["ein Hund läuft", "Haus"], return_tensors="pt", padding=True)
    expected = greedy(oracle, batch["input_ids"], 8)
    generated = model.generate(**batch, num_beams=1, do_sample=False, max_new_tokens=8)
    assert generated.tolist() == expected[:, : generated.shape[1]].tolist()
    assert "PyTorch" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
