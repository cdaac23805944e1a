"""Load that takes minutes: ten thousand requests at once, and memory that stays as it is."""

import itertools
import random

import pytest
import served
from served import LANGUAGES, SENTENCES, Limits, all_at_once, translated

folder, loaded, make = served.folder, served.loaded, served.make


@pytest.mark.slow
def test_nothing_is_lost_or_swapped_among_ten_thousand_requests_at_once(make, loaded):
    app = make(limits=Limits(queue=20_000, seconds=800))
    pairs = random.Random(0).choices(list(itertools.product(SENTENCES, repeat=2)), k=10_000)
    alone = dict(zip(SENTENCES, translated(loaded, SENTENCES), strict=True))
    answers = all_at_once(app, "/translate", [{"q": " ".join(pair), **LANGUAGES} for pair in pairs], timeout=None)
    texts = [answer.json().get("translatedText") for answer in answers]
    assert texts == [" ".join(map(alone.get, pair)) for pair in pairs]
    assert app.state.service.models.pending == 0
