"""What imports what: one way only, and files that travel to the Hub stand alone."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "vaswani_transformer"
MODULES = sorted(PACKAGE.glob("*.py"))
# Each module may import modules of earlier lines only.
LAYERS = [
    ["linear_vaswani", "restricted_vaswani", "sentences_vaswani"],
    ["paper_tables", "layer_costs"],
    ["errors", "configuration_vaswani", "pipeline_vaswani", "generation_vaswani", "memory", "synthetic_lexicon"],
    ["files", "text_files", "filtering", "agreement", "starting", "read_ahead", "long_lines"],
    ["survey", "resumable_output", "turns", "trees"],
    ["linearization", "bracket_scores", "tree_augmentation", "tree_pictures"],
    ["layers_vaswani", "checkpoint_vaswani", "provenance", "earlier_card", "flops", "devices", "checkpoints", "watch"],
    ["decoding_vaswani", "inference"],
    ["stacks_vaswani"],
    ["modeling_vaswani", "batching", "loss", "schedule", "averaging", "metrics", "tokenization", "data", "synthetic"],
    ["paper_bleu", "layer_kinds"],
    ["exported"],
    ["callbacks", "tokenized_pairs", "recipe", "attention_maps", "meters", "checkpointing", "loading", "windows"],
    ["tree_tokenizer", "bracket_grammar"],
    ["scoring", "ensemble", "alignments"],
    ["attention_weights", "position_study"],
    ["attention_pictures", "attention_page", "attention_heads"],
    ["recipe_data", "prepared", "plots", "trainer", "translation", "run_folder", "pipelines"],
    ["ctranslate2_search", "export_ctranslate2", "export_onnx"],
    ["attention_report", "position_report"],
    ["final_weights", "averaged_model", "translating_files", "ctranslate2_translation"],
    ["training", "shards", "card_facts", "conversion", "exporting"],
    ["card_rows"],
    ["model_card"],
    ["demo", "parsing", "publishing", "plan", "preparation"],
    ["parsing_files"],
    ["plan_text", "decoding_options", "experiments"],
    ["experiment_jobs"],
    ["experiment_processes"],
    ["experiment_cells"],
    ["table1", "table2", "table3", "table4", "experiment_positions"],
    ["experiment_attention"],
    ["command_line", "cli_files"],
    [
        "cli_training",
        "cli_translating",
        "cli_scoring",
        "cli_evaluating",
        "cli_sharing",
        "cli_data",
        "cli_attention",
        "cli_averaging",
        "cli_experiments",
        "cli_exporting",
        "cli_parsing",
    ],
    ["cli"],
    ["__main__"],
]
TRAVELS = (
    "checkpoint_vaswani",
    "configuration_vaswani",
    "decoding_vaswani",
    "generation_vaswani",
    "layers_vaswani",
    "linear_vaswani",
    "restricted_vaswani",
    "modeling_vaswani",
    "pipeline_vaswani",
    "sentences_vaswani",
    "stacks_vaswani",
)


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level == 1:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found.update(names)
            elif node.module and node.module.split(".")[0] == PACKAGE.name:
                found.add(node.module.partition(".")[2] or "__init__")
    return found - {"__version__"}


def test_every_module_has_its_place():
    assert sorted(path.stem for path in MODULES) == sorted(["__init__", *(name for layer in LAYERS for name in layer)])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_go_one_way(path):
    if path.stem == "__init__":
        return
    level = next(index for index, layer in enumerate(LAYERS) if path.stem in layer)
    allowed = {name for layer in LAYERS[:level] for name in layer}
    if path.stem in TRAVELS:
        allowed &= set(TRAVELS)
    assert own_imports(path) <= allowed | ({"errors"} if path.stem not in TRAVELS and level else set())


@pytest.mark.parametrize("name", TRAVELS)
def test_files_for_the_hub_import_installed_libraries_only(name):
    tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add(node.module.partition(".")[0])
    assert roots - set(sys.stdlib_module_names) <= {"torch", "transformers", "huggingface_hub", "safetensors"}


def test_no_file_is_too_long_to_read():
    long = {path.name: count for path in MODULES if (count := path.read_text().count("\n")) > 500}
    assert not long
