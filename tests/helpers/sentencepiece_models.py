"""SentencePiece models trained in a test, and texts on which readers of them may differ."""

from pathlib import Path

from hypothesis import strategies as st

# What the two libraries read by different rules, were it not for `SentencePieceText`: graphemes of several characters,
# runs of spaces, the sign for a space itself, names of special tokens.
POOLS = (
    "ab ▁<", "aeou\u0301\u0302\u0323\u0308 ﬁﬂ½…", "가각ᄀ\u1161\u11a8 かが\u3099\uff76\uff9e",
    "\t\n\r\u00a0\u200d\u200b ab", "กำา่้ क़\u093c\u09c7\u09be ﻻ\u064b", "👨\u200d👩❤\ufe0f🇩🇪🏽", "..--..  aaa",
    "\ufff1\ufff7 a\u0301",
)  # fmt: skip
UNASSIGNED = "\0\ufff0\ufff2\ufff3\ufff4\ufff5\ufff6"  # signs of our own, and the end of a text in C
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters=UNASSIGNED), max_size=40),
    st.lists(st.sampled_from(("".join(POOLS), "</s>", "<unk>", "<pad>")).map(str), max_size=3).map("".join),
    st.sampled_from((*POOLS, "".join(POOLS))).flatmap(lambda pool: st.text(st.sampled_from(pool), max_size=25)),
)


def trained(folder: Path, texts, name: str = "model", **options) -> Path:
    """A SentencePiece model file."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / name), minloglevel=2, num_threads=1,
        hard_vocab_limit=False, **{"vocab_size": 400, **options},
    )  # fmt: skip
    return folder / f"{name}.model"
