"""What goes to the Hub is a list of what may; cards and evaluation files of strangers do no harm."""

import json
import re
import shutil
import time

import pushing
import pytest
import yaml
from conftest import error_of, tiny_config
from hub_server import Fault
from huggingface_hub import ModelCard
from model_folders import change
from pushing import REPO
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stores import refuse, web_server

from vaswani_transformer.evaluation.records import weights_sha256
from vaswani_transformer.hub.card_facts import CardFacts, read_run, results_of_record
from vaswani_transformer.hub.model_card import carry_over, escaped, may_be_replaced, render_card, seal

model, push, scores = pushing.model, pushing.push, pushing.scores

# A name of a user, and a secret, in paths of both kinds.
CANARY = re.compile(rb"canary", re.IGNORECASE)
HOME, SHARE, SECRET = "/home/canary/work", "C:\\Users\\canary\\work", "hf_canaryCanaryCANARY"


@pytest.fixture
def planted(model, tmp_path):
    """A copy of the model's folder with canaries wherever something can hold one, and the model can still be loaded."""
    folder = shutil.copytree(model, tmp_path / "canary" / "run")
    strings = {"_name_or_path": HOME, "name_or_path": SHARE, "api_key": SECRET, f"{HOME}/key": 1, "auto_map": {}}
    nested = {"notes": {"by": ["canary", {"path": HOME}]}, "_from": HOME, "commit_hash": SECRET}
    settings = {"transformers_version": SECRET, "problem_type": None, "task_specific_params": {"canary": HOME}}
    labels = {"id2label": {"0": "canary", "1": HOME}, "label2id": {"canary": 0, HOME: 1}, "tokenizer_class": "canary"}
    change(folder, "config.json", **strings, **nested, **settings, **labels, architectures=["canary"])
    unset = dict.fromkeys((*strings, *nested))  # with values the search would refuse the names
    change(folder, "generation_config.json", **unset, num_beams=3, transformers_version=SECRET)
    tokens = {"chat_template": f"{{# {HOME} #}}", "tokenizer_file": HOME, "special": SHARE, "cache_dir": HOME}
    tokens |= {"auto_map": {"AutoTokenizer": [SECRET, HOME]}}
    change(folder, "tokenizer_config.json", **strings | nested | tokens)
    change(folder, "special_tokens_map.json", note=HOME)
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", {"format": "pt", "path": HOME, "user": "canary"})
    recipe = {"train_source": f"{SHARE}\\train.en", "train_target": f"{HOME}/train.de", "my_note": SECRET}
    recipe |= {"train_data": "\\\\canary\\share\\x.tsv", "validation_data": f"{SHARE}\\pairs.tsv", "output": HOME}
    recipe |= dict.fromkeys(("data_config", "data_dir", "validation_split", "tokenizer"), HOME)
    recipe |= dict.fromkeys(("train_split", "report_to"), "canary")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    log = [{"step": 5, "seconds": 1.0, "note": HOME}, {"step": "canary", "epoch": "canary"}, ["canary"], HOME]
    (folder / "training_log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    code = sorted(path.name for path in folder.glob("*.py"))
    (folder / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    others = ["notes.txt", ".env", "mine.py", "optimizer.pt", "trainer_state.json", "vocab.json", "chat_template.jinja"]
    others += ["README.md", "checkpoints/checkpoint-5/rng_state.pth", "checkpoints/checkpoint-5/trainer_state.json"]
    for name in (*others, *code):  # the package's own code is what is published
        (folder / name).write_text(f"{HOME} {SHARE} {SECRET}\n")
    return folder


def canaries(hub):
    """Where something that must not be there has arrived: in a request's body or in a file."""
    held = {name: data for each in hub.repositories for name, data in hub.files(each).items()}
    held |= {f"object {digest}": data for digest, data in hub.objects.items()}
    held |= {f"request {number}": data for number, data in enumerate(hub.bodies)}
    return [name for name, data in held.items() if CANARY.search(data)]


def test_nothing_goes_up_that_is_not_on_the_list(push, hub, planted, model, scores, tmp_path):
    record = json.loads(scores.read_text())
    changes = {"by": "canary", "generation": record["generation"] | {"cache_dir": HOME, "stop_strings": ["canary"]}}
    change(tmp_path, "scores.json", **record | changes | {"weights_sha256": weights_sha256(planted)})
    done = push("--evaluation", tmp_path / "scores.json", folder=planted)
    assert canaries(hub) == []
    files = hub.files(REPO)
    (tmp_path / "pushed").write_bytes(files["model.safetensors"])
    with safe_open(tmp_path / "pushed", "pt") as weights:
        assert weights.metadata() == {"format": "pt"}
    expected = {path.name for path in model.glob("*.py")} | {"config.json", "generation_config.json", "README.md"}
    expected |= {"tokenizer.json", "tokenizer_config.json", "model.safetensors", ".gitattributes"}
    assert files.keys() == expected
    assert all(files[name] == (model / name).read_bytes() for name in expected if name.endswith(".py"))
    # What was left out is said once, and what is not news is not.
    [line] = [line for line in done.err.splitlines() if "not published" in line]
    left_out = "api_key", "of config.json", "notes", "chat_template.jinja", "of tokenizer_config.json"
    assert all(words in line for words in left_out) and "is_local" not in line
    dry = push("--evaluation", tmp_path / "scores.json", "--dry-run", folder=planted)
    assert line in dry.err and not CANARY.search(dry.out.encode())
    # All that makes the model is there.
    config, card = json.loads(files["config.json"]), files["README.md"].decode()
    assert config["d_model"] == 24 and config["architectures"] == ["VaswaniForConditionalGeneration"]
    assert json.loads(files["generation_config.json"])["num_beams"] == 3
    shown = "| train.en |", "pairs.tsv", "--source test.en --reference test.de --beams 2", "### test"
    assert all(words in card for words in shown)


HOSTILE = (
    "</td><script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "`|` a | b",
    "one\n---\nlicense: gpl\n---\n# two",
    "![](http://tracker.example/x.png) www.tracker.example",
    "<!-- --> {{ 7 * 7 }} \\",
    "*a* _b_ ~~c~~ $d$ &lt; #",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_values_mean_themselves_in_markdown(text):
    recipe = {"train_source": text.replace("/", ""), "train_target": "b"}
    record = {"test_set": text, "bleu": 1.0, "source_file": text, "bleu_signature": text, "command": text, "date": text}
    record |= {"versions": {text: text}}
    results = results_of_record(record, "scores.json")
    card = render_card(CardFacts("o/m", tiny_config(), 1, recipe=recipe, results=results, license="mit"))
    data = ModelCard(card).data
    assert data.license == "mit" and {result.dataset_name for result in data.eval_results} == {" ".join(text.split())}
    # Outside code nothing is left that Markdown or HTML would take for more than text.
    body = card.split("\n---\n", 1)[1].partition("\n<!-- For")[0].partition("## Model\n")[2].partition("## Citation")[0]
    body = re.sub(r"(?ms)^(```+)\n.*?\n\1$|(?<![`\\])(`+)(?!`).*?(?<!`)\2(?!`)", "CODE", body).partition("<!-- ")[0]
    assert not re.search(r"<\w|</|(?<!\\)\]\(|(?<!\\)[`\[]|https?:/|www\.", body), body
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in body.splitlines() if line.startswith("|"))
    assert "\n# two" not in card and "49" not in escaped("{{ 7 * 7 }}")


RECORD = {"test_set": "t", "bleu": 1.0, "generation": {}, "versions": {}, "command": "v"}


@pytest.mark.parametrize(
    "changes",
    [{"bleu": float("nan")}, {"bleu": 10**4000}, {"chrf": True}, {"test_set": None}, {"generation": []}, {"date": 5}],
    ids=str,
)
def test_fields_of_wrong_kinds_are_refused(changes):
    error_of(results_of_record, RECORD | changes, "scores.json")


def test_of_a_record_known_settings_are_kept_in_known_forms():
    def how(**changes):
        [result] = results_of_record(RECORD | changes, "scores.json")
        return {name: value for name, value in result.metric_args.items() if value is not None}

    settings = {"num_beams": 4, "early_stopping": "never", "bad_words_ids": [[1], [2, 3]], "fuzzy_matches": True}
    others = {"early_stopping ": "never", "stop_strings": ["a"], "cache_config": {"a": 1}, "num_beam_groups": "a"}
    known = settings | {"bad_words_ids": "[[1], [2, 3]]", "command": "v"}
    assert how(generation=settings | others, x=1) == known
    deep = [4]
    for _ in range(900):
        deep = [deep]
    assert how(generation={"num_beams": deep}) == {"command": "v"}
    assert how(command="a\n\nb", date="a\n---\n\x1b[2Jb\u202e") == {"command": "a b", "date": "a --- [2Jb"}


BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))])


@pytest.mark.parametrize(
    "recipe",
    [f"{BOMB}\ntrain_data: *a29\nseed: 1\n", "seed: 1\ntrain_data: " + "[" * 400, "seed: " + "9" * 5000, "\udcff"],
    ids=["aliases", "depth", "digits", "bytes"],
)
def test_a_hostile_recipe_or_log_is_not_read(tmp_path, recipe):
    (tmp_path / "recipe.yaml").write_bytes(recipe.encode("utf-8", "surrogateescape"))
    for log in (b"[" * 100_000, b"\xff\n", b'{"step": ' + b"9" * 5000 + b"}\n", b'{"step": NaN, "epoch": "x"}\n'):
        (tmp_path / "training_log.jsonl").write_bytes(log)
        recipe = read_run(tmp_path)
        assert not recipe.keys() & {"train_data", "optimizer steps"}
        render_card(CardFacts("o/m", tiny_config(), 1, recipe=recipe))


CARDS = {
    "aliases": f"---\n{BOMB}\nlanguage: *a29\nlicense: mit\n---\n",
    "depth": "---\nlicense: mit\nx: " + "[" * 400 + "\n---\n",
    "newlines": "---\n" + "\n" * 10**6,
    "types": "---\nlicense: {a: 1}\nlanguage: {b: 2}\ndatasets: [[c], 5, '<b>', ../x]\n---\n",
    "list": "---\n- a\n---\n",
}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("end", ["", "\nThis model card has been automatically generated.\n"])
def test_a_hostile_card_is_read_in_no_time_and_gives_nothing(card, end):
    for text in (card + end, seal(card + end)):
        started = time.monotonic()
        may_be_replaced(text)
        facts = carry_over(CardFacts("o/m", tiny_config(), 1), text)
        assert time.monotonic() - started < 5
        assert not facts.languages and not facts.datasets and facts.license in (None, "mit") and not facts.results
        render_card(facts)


@pytest.mark.parametrize("redirected", ["whoami", "resolve"])
def test_the_token_does_not_follow_a_redirect_to_another_host(push, forked, hub, model, redirected):
    seen = []

    def answer(handler):
        seen.append(str(handler.headers))
        refuse(404)(handler)

    push()
    with web_server(answer) as url:
        redirect = 307, b"", {"Location": url.replace("127.0.0.1", "localhost")}
        hub.faults += [Fault(method, redirected, 99, redirect) for method in ("GET", "HEAD")]
        done = forked.vaswani("push", model, REPO, "--language", "fr")
    assert done.status and "Traceback" not in done.err
    assert not any("hf_writer" in headers for headers in seen)
    assert seen or redirected == "resolve"  # the client takes a file's address from the Hub only
