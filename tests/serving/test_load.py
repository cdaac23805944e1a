"""Load that takes minutes: ten thousand requests at once, and memory that stays as it is."""

import asyncio
import itertools
import random
import subprocess
import sys

import pytest
import served
from conftest import ROOT
from exporting_models import save_trained_model, small_tokenizer
from served import SENTENCES, Limits, client_of, translated

folder, loaded, make = served.folder, served.loaded, served.make

LANGUAGES = {"source": "en", "target": "de"}


@pytest.mark.slow
def test_nothing_is_lost_or_swapped_among_ten_thousand_requests_at_once(make, loaded):
    app = make(limits=Limits(queue=20_000, seconds=800))
    pairs = random.Random(0).choices(list(itertools.product(SENTENCES, repeat=2)), k=10_000)
    alone = dict(zip(SENTENCES, translated(loaded, SENTENCES), strict=True))

    async def run():
        async with client_of(app) as client:

            async def post(text):
                response = await client.post("/translate", json={"q": text, **LANGUAGES}, timeout=None)
                return response.json().get("translatedText")

            return await asyncio.gather(*(post(" ".join(pair)) for pair in pairs))

    assert asyncio.run(run()) == [" ".join(map(alone.get, pair)) for pair in pairs]
    assert app.state.service.models.pending == 0


@pytest.mark.slow
def test_the_benchmark_measures_every_server(tmp_path):
    pytest.importorskip("ctranslate2", reason="needs CTranslate2: pip install 'vaswani_transformer[ctranslate2]'")
    folder = save_trained_model(tmp_path / "model", small_tokenizer())
    (tmp_path / "lines").write_text("\n".join(SENTENCES))
    script = ROOT / "scripts" / "benchmarks" / "serving.py"
    command = [sys.executable, script, folder, "--sentences", tmp_path / "lines"]
    options = ["--seconds", "2", "--rounds", "2", "--clients", "4", "--precision", "int8"]
    table = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 1 + 3 and all(float(row[3]) > 0 for row in rows)
    table = subprocess.run([*command, "--soak", "5"], check=True, capture_output=True, text=True).stdout
    assert len(table.splitlines()) == 12
