"""Load that takes minutes: ten thousand requests at once, and memory that stays as it is."""

import asyncio
import itertools
import random

import pytest
import served
from served import LANGUAGES, SENTENCES, Limits, client_of, translated

folder, loaded, make = served.folder, served.loaded, served.make


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
