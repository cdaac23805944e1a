"""Constrained decoding of trees: a `LogitsProcessor` that leaves only the tokens that lead to a tree.

At every step the state of each output (how many constituents are open, the label of the innermost one, how many words
have their tag) is computed from all of its tokens, for all rows at once. Nothing is kept between steps, so that beam
search may reorder the rows.
"""

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor


class BracketGrammar:
    """The tokens of trees, by what they do; `ids` are those of `tree_token_ids`."""

    def __init__(self, ids: Mapping[str, int], eos_token_id: int):
        tokens = sorted(ids, key=ids.__getitem__)
        opens, closes = ([token.startswith(bracket) for token in tokens] for bracket in "()")
        numbers = {token[1:]: number for number, token in enumerate(compress(tokens, opens))}
        labels = [numbers[token[1:]] if token.startswith(("(", ")")) else -1 for token in tokens]
        # In one order, `(tokens,)`: brackets, tags and, last, the token that ends an output.
        self.ids = torch.tensor([*(ids[token] for token in tokens), eos_token_id])
        self.opens, self.closes = torch.tensor([*opens, False]), torch.tensor([*closes, False])
        self.ends = torch.arange(len(self.ids)) == len(tokens)
        self.tags = ~(self.opens | self.closes | self.ends)
        self.labels = torch.tensor([*labels, -1])  # number of the label that is opened or closed
        # By token id, with one more entry for all ids above those of the grammar.
        self.depth_change = self._by_id(0, self.opens.long() - self.closes.long())
        self.is_tag = self._by_id(0, self.tags.long())
        self.is_piece = self._by_id(1, torch.zeros_like(self.ids))  # tokens of words
        self.label = self._by_id(-1, self.labels)

    def _by_id(self, other: int, values: torch.Tensor) -> torch.Tensor:
        table = torch.full((int(self.ids.max()) + 2,), other)
        table[self.ids] = values
        return table


class BracketProcessor(LogitsProcessor):
    """Rules out every token that does not lead to a tree over the given words within the given length.

    After each step the rest of the tree still fits and some token is allowed, so every output ends and is a whole tree.
    A tree has one constituent over all words (a single word may go without), and at most `max_open_run` constituents
    open one right after the other, which bounds unary chains. Where words are part of the output (`with_words`), their
    tokens follow the tag of the word before with probability 1, whatever the model predicts.

    Args:
        grammar: the tokens.
        words: for each sentence of the batch and each of its words its token ids; empty lists if it is not written.
        limits: most tokens of each output, `</s>` included: at least a tag for each word, the words' tokens and
            `</s>`, and no more than `generate()` itself allows, which would otherwise cut a tree off.
    """

    max_open_run = 12  # GUM has 6 at most

    def __init__(self, grammar: BracketGrammar, words: Sequence[Sequence[Sequence[int]]], limits: Sequence[int]):
        self.grammar = grammar
        self.words, self.limits = torch.tensor(list(map(len, words))), torch.tensor(limits)
        #: The tokens of all words of a sentence; for each word the number of tokens up to its end.
        self.pieces = _padded([[piece for word in sentence for piece in word] or [-1] for sentence in words], -1)
        self.ends = _padded([list(map(len, sentence)) for sentence in words], 0).cumsum(dim=1)

    def allowed(self, input_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that may follow each output `(rows, length)`; the rows of a sentence are adjacent.

        Returns:
            bool `(rows, tokens)`, for the tokens of `grammar.ids`; `(rows,)`: a word's token that must follow, or -1.
        """
        for holder in (self, self.grammar):
            tensors = {name: value for name, value in vars(holder).items() if isinstance(value, torch.Tensor)}
            vars(holder).update({name: value.to(input_ids.device) for name, value in tensors.items()})
        grammar, step = self.grammar, input_ids.shape[1] - 1  # without the start token
        copies = len(input_ids) // len(self.words)
        words, limits, pieces, ends = (
            tensor.repeat_interleave(copies, dim=0) for tensor in (self.words, self.limits, self.pieces, self.ends)
        )
        # Rows that the search has discarded may hold anything: what is allowed there does not matter.
        ids = input_ids[:, 1:].clamp(max=len(grammar.label) - 1)
        changes = grammar.depth_change[ids]
        depths = changes.cumsum(dim=1)
        depth = changes.sum(dim=1)  # constituents that are open
        places = torch.arange(1, step + 1, device=ids.device)
        # The innermost open constituent is the last one whose opening has led to the present depth.
        opened = (((changes == 1) & (depths == depth[:, None])).long() * places).amax(dim=1) if step else depth
        last_other = ((changes != 1).long() * places).amax(dim=1) if step else depth
        innermost = grammar.label[ids.gather(1, (opened - 1).clamp(min=0)[:, None])][:, 0] if step else depth - 1
        run = step - last_other  # constituents opened since any other token
        tagged = grammar.is_tag[ids].sum(dim=1)
        missing = words - tagged  # words without their tag
        written = grammar.is_piece[ids].sum(dim=1)
        # All tokens of a word come before its tag, and right after the tag of the word before.
        due = ends.gather(1, tagged.clamp(max=ends.shape[1] - 1)[:, None])[:, 0]
        following = pieces.gather(1, written.clamp(max=pieces.shape[1] - 1)[:, None])[:, 0]
        forced = following.masked_fill((written >= due) | (missing <= 0), -1)
        spare = limits - step - (ends[:, -1] - written + missing + depth + 1)  # beyond what finishes the tree from here

        can_continue = (forced < 0) & (missing > 0)
        may_open = can_continue & (spare >= 2) & (run < self.max_open_run) & ((depth > 0) | (tagged == 0))
        may_tag = can_continue & ((depth > 0) | (words == 1) | ~may_open)
        may_close = (forced < 0) & (run == 0) & ((depth > 1) | ((depth == 1) & (missing <= 0)))
        may_end = (depth == 0) & (missing <= 0)
        allowed = (
            (may_open[:, None] & grammar.opens)
            | (may_tag[:, None] & grammar.tags)
            | (may_close[:, None] & grammar.closes & (grammar.labels == innermost[:, None]))
            | (may_end[:, None] & grammar.ends)
        )
        return allowed, forced

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores `(rows, vocab_size)`, -inf for all but the allowed tokens."""
        allowed, forced = self.allowed(input_ids)
        constrained = torch.full_like(scores, -torch.inf)
        constrained[:, self.grammar.ids] = scores[:, self.grammar.ids].masked_fill(~allowed, -torch.inf)
        if bool((forced >= 0).any()):
            # Writing a given word costs nothing, or beams that delay it with more brackets would stay ahead.
            certain = torch.full_like(scores, -torch.inf).scatter_(1, forced.clamp(min=0)[:, None], 0.0)
            constrained = torch.where((forced >= 0)[:, None], certain, constrained)
        return constrained


def _padded(rows: Sequence[Sequence[int]], filling: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=filling)
