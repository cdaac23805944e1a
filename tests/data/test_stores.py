"""Text and prepared folders in object stores, on the Hub and on web servers: as on the disk, or refused in one line."""

import dataclasses
import gzip
import json
import sys
from pathlib import Path

import preparing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stores
from conftest import error_of
from hub_server import Repository
from pair_files import GERMAN
from preparing import digests, make, noted_writes
from test_tmx import by_library
from training_runs import equal, kill_before_selection, weights_of

from vaswani_transformer import train
from vaswani_transformer.data.parallel_text import load_pairs, pair_source
from vaswani_transformer.data.prepared import open_prepared
from vaswani_transformer.files import to_path

small_chunks = preparing.small_chunks
text = preparing.text
tokenizer_folder = preparing.tokenizer_folder
recipe = preparing.recipe
store = stores.store
TWO = {"train_source": "part.[01].en", "train_target": "part.[01].de"}  # files of the text


def send(folder: Path, url: str) -> str:
    """Copy the files of a folder into the store."""
    for path in folder.iterdir():
        (to_path(url) / path.name).write_bytes(path.read_bytes())
    return url


def fetched(url: str, folder: Path) -> Path:
    """Copy a folder of the store to the disk."""
    root = to_path(url)
    root.fs.get(root.path, str(folder), recursive=True)
    return folder


def test_text_and_folder_in_a_store_give_the_bytes_that_they_give_here(recipe, text, store, tmp_path):
    recipe = dataclasses.replace(recipe, tokenizer=None, **TWO)
    remote = dataclasses.replace(recipe, data_dir=send(text, f"{store}/text"))
    output = f"{store}/prepared"
    here, from_there = make(recipe, tmp_path / "here"), make(remote, tmp_path / "from")
    assert from_there == make(remote, output) == make(remote, output)  # the second finds it done
    assert here | {"files": {}} == from_there | {"files": {}}
    expected, actual = digests(tmp_path / "from"), digests(fetched(output, tmp_path / "fetched"))
    assert expected == actual
    del expected["manifest.json"]
    assert expected.items() <= digests(tmp_path / "here").items()
    assert open_prepared(output).train.sha256() == open_prepared(tmp_path / "here").train.sha256()
    again = error_of(make, remote, output, overwrite=True)
    assert again == f"{output} is not on this machine, where nothing is removed: remove it yourself first"


@pytest.mark.parametrize("suffix", ["tsv", "jsonl", "parquet", "tsv.gz", "tmx"])
def test_files_of_pairs_in_a_store_are_read_as_here(store, tmp_path, suffix):
    pairs = [(f"a house {number}", f"ein Haus {number}") for number in range(30)]
    rows, path = [dict(zip(("source", "target"), pair, strict=True)) for pair in pairs], tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif suffix == "tmx":
        path.write_bytes(by_library(pairs))
    else:
        lines = "".join(json.dumps(row) + "\n" if suffix == "jsonl" else "\t".join(row.values()) + "\n" for row in rows)
        path.write_bytes(gzip.compress(lines.encode()) if suffix == "tsv.gz" else lines.encode())
    send(tmp_path, f"{store}/pairs")
    columns = GERMAN if suffix == "tmx" else {}
    source = pair_source(data=f"{store}/pairs/?.{suffix}", **columns)
    assert list(source.stream()) == list(pair_source(data=path, **columns).stream()) == pairs
    assert source.load()[:]["target"] == [target for _, target in pairs]


def test_a_shard_that_has_changed_in_a_store_is_named(recipe, store):
    url = f"{store}/shared"
    make(recipe, url)
    validation = to_path(url) / "validation-00000.arrow"
    validation.write_bytes(validation.read_bytes()[::-1])
    assert f"{validation}: the content has changed" in error_of(open_prepared(url).verify)


@pytest.mark.slow
def test_a_preparation_into_a_store_and_a_training_on_it_are_resumed(recipe, store, tmp_path, monkeypatch):
    settings = {"max_steps": 4, "warmup_steps": 2, "evaluate_every": 2, "validation_bleu": 0, "average_checkpoints": 0}
    recipe, url = dataclasses.replace(recipe, **settings), f"{store}/resumed"
    make(recipe, tmp_path / "p")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        written = noted_writes(patch, stop_at=2)
        make(recipe, url)
    rest = noted_writes(monkeypatch)
    make(recipe, url)
    assert len({*written, *rest}) == len(written + rest) == 7  # no shard twice
    assert digests(fetched(url, tmp_path / "fetched")) == digests(tmp_path / "p")
    straight = dataclasses.replace(recipe, output=str(tmp_path / "straight"), prepared=str(tmp_path / "p"))
    resumed = dataclasses.replace(recipe, output=str(tmp_path / "resumed"), prepared=url)
    kill_before_selection(dataclasses.replace(resumed, max_steps=2))
    straight, resumed = (weights_of(train(run, progress=False).folder) for run in (straight, resumed))
    assert equal(straight, resumed)


@pytest.fixture
def hurried(monkeypatch):
    """Clients that give up soon."""
    import s3fs

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    stores.forget()
    yield
    stores.forget()


def test_a_store_that_refuses_or_lacks_a_file_is_named_in_one_line(recipe, store, tmp_path, monkeypatch, hurried):
    assert error_of(load_pairs, data=f"{store}/no.tsv").startswith(f"{store}/no.tsv: ")
    assert error_of(load_pairs, data=f"{store}/no*.tsv").startswith(f"{store}/no*.tsv: ")
    assert "no-such-bucket/p" in error_of(open_prepared, "s3://no-such-bucket/p")
    with stores.web_server(stores.refuse(403)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        stores.forget()
        for action in (
            lambda: load_pairs(data="s3://secret/a.tsv"),
            lambda: make(dataclasses.replace(recipe, data_dir="s3://secret/text"), tmp_path / "p"),
            lambda: make(recipe, "s3://secret/p"),
            lambda: open_prepared("s3://secret/p"),
        ):
            message = error_of(action)
            assert message.startswith("s3://secret/") and "Forbidden" in message


def test_an_url_whose_package_is_missing_or_unknown_names_what_to_do(monkeypatch):
    assert error_of(load_pairs, data="foo://x/a.tsv").endswith(": Protocol not known: foo")
    monkeypatch.setitem(sys.modules, "upath", None)
    message = error_of(load_pairs, data="s3://corpora/a.tsv")
    assert message.startswith("s3://corpora/a.tsv") and "pip install 'vaswani_transformer[remote]'" in message


def test_text_and_a_prepared_folder_in_a_dataset_on_the_hub(hub, recipe, text, tmp_path):
    pytest.importorskip("upath")
    make(recipe, tmp_path / "p")
    here = open_prepared(tmp_path / "p").train
    files = {path.name: path.read_bytes() for path in text.iterdir()}
    for path in (tmp_path / "p").rglob("*.*"):
        files[path.relative_to(tmp_path).as_posix()] = path.read_bytes()
    hub.repositories["datasets/tester/corpus"] = repository = Repository()
    repository.commit("main", "text", files)
    name = "hf://datasets/tester/corpus"
    source = pair_source(f"{name}/part.*.en", f"{name}/part.*.de")
    assert list(source.stream()) == list(pair_source(text / "part.*.en", text / "part.*.de").stream())
    there = open_prepared(f"{name}/p").train
    assert there.as_dataset()[:] == here.as_dataset()[:] and there.sha256() == here.sha256()
    assert error_of(load_pairs, source=f"{name}/no.en", target=f"{name}/no.de").startswith(f"{name}/no.en: ")
    assert "no-such" in error_of(load_pairs, data="hf://datasets/tester/no-such/a.tsv")
