"""Decoding that writes nothing but trees: which tokens may follow, step by step, as a `LogitsProcessor`.

The state of an output is worked out from its tokens at every step, for all rows at once: how many constituents are
open, which label is the innermost one's, how many words have their tag. Nothing is remembered between steps, so beams
may change places as they like.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor

from ..errors import UserError
from .linearization import is_close, is_open

MAX_OPEN_RUN = 12  # constituents opened one right after the other; GUM has 6 at most


class BracketGrammar:
    """The tokens of trees, by what they do.

    Args:
        ids: id of each token that trees are written with, as from `tree_token_ids`.
        eos_token_id: the token that ends an output.
    """

    def __init__(self, ids: Mapping[str, int], eos_token_id: int):
        tokens = sorted(ids, key=ids.__getitem__)
        self.eos_token_id = eos_token_id
        #: Ids of brackets, tags and the token that ends an output, `(tokens,)`; that one is last. All other tensors go
        #: with these.
        self.ids = torch.tensor([*(ids[token] for token in tokens), eos_token_id])
        self.opens = torch.tensor([*map(is_open, tokens), False])
        self.closes = torch.tensor([*map(is_close, tokens), False])
        self.ends = torch.arange(len(self.ids)) == len(tokens)
        self.tags = ~(self.opens | self.closes | self.ends)
        labels = {token[1:]: number for number, token in enumerate(filter(is_open, tokens))}
        #: Number of the label that a token opens or closes; -1 for other tokens.
        self.labels = torch.tensor([*(-1 if self._is_tag(token) else labels[token[1:]] for token in tokens), -1])

    @staticmethod
    def _is_tag(token: str) -> bool:
        return not (is_open(token) or is_close(token))


def least_tokens(words: Sequence[Sequence[int]]) -> int:
    """Tokens that the smallest tree over these words takes, `</s>` counted; words as `BracketProcessor` has them."""
    return sum(map(len, words)) + len(words) + 1


@dataclass(frozen=True)
class _State:
    """Of each output, `(rows,)`.

    Args:
        depth: constituents that are open.
        innermost: number of the label of the innermost one; of anything where none is open.
        run: constituents that were opened since anything else was written.
        tagged: words that have their tag.
        forced: id of the word's token that has to follow; -1 where none has to.
        spare: tokens beyond those that finish the tree from here.
        single: whether the sentence is a single word.
        missing: words that have no tag yet.
    """

    depth: torch.Tensor
    innermost: torch.Tensor
    run: torch.Tensor
    tagged: torch.Tensor
    forced: torch.Tensor
    spare: torch.Tensor
    single: torch.Tensor
    missing: torch.Tensor


class BracketProcessor(LogitsProcessor):
    """Rules out every token that leads away from a tree over the given words within the given length.

    After each step the rest of the tree still fits, and some token is always allowed: every output ends, whole. A tree
    has one constituent over all words (a single word may go without), and no more than `max_open_run` constituents that
    begin with nothing between them, which bounds unary chains. Where words are part of the output (`with_words`), their
    tokens are what follows the tag of the word before, with probability 1 whatever the model thinks of them.

    Args:
        grammar: the tokens.
        words: of each sentence of the batch, and of each of its words the token ids that are written for it; none where
            words are not written.
        limits: tokens that each output may have, `</s>` counted; at least one more than its words and their tags take,
            and no more than `generate()` itself allows, which would else cut a tree off.
        max_open_run: see above.
        begin: tokens that the decoder is started with.

    Raises:
        UserError: for a sentence without words, or a limit that no tree keeps.
    """

    def __init__(
        self,
        grammar: BracketGrammar,
        words: Sequence[Sequence[Sequence[int]]],
        limits: Sequence[int],
        max_open_run: int = MAX_OPEN_RUN,
        begin: int = 1,
    ):
        self.grammar, self.max_open_run, self.begin = grammar, max_open_run, begin
        for sentence, limit in zip(words, limits, strict=True):
            if not sentence:
                raise UserError("a sentence without words has no tree: leave it out")
            if limit < (least := least_tokens(sentence)):
                raise UserError(
                    f"a tree over {len(sentence)} words takes at least {least} tokens and an output may have {limit}:"
                    " raise --max-new-tokens"
                )
        self.words, self.limits = torch.tensor(list(map(len, words))), torch.tensor(limits)
        #: The words' tokens one after the other; of each place among the words how many there are up to its end.
        self.pieces = _padded([[piece for word in sentence for piece in word] for sentence in words], -1)
        lengths = _padded([list(map(len, sentence)) for sentence in words], 0)
        self.ends = lengths.cumsum(dim=1)
        size = max(int(grammar.ids.max()), int(self.pieces.max())) + 2  # the last entry is any other token's
        # By id: +1 opens, -1 closes; 1 is a word's tag; 1 is one of a word's tokens; number of the label it opens.
        self.depth_change = torch.zeros(size, dtype=torch.long)
        self.depth_change[grammar.ids] = grammar.opens.long() - grammar.closes.long()
        self.is_tag = torch.zeros(size, dtype=torch.long)
        self.is_tag[grammar.ids] = grammar.tags.long()
        self.is_piece = torch.ones(size, dtype=torch.long)
        self.is_piece[grammar.ids] = 0
        self.label = torch.full((size,), -1)
        self.label[grammar.ids] = grammar.labels

    def _to(self, device: torch.device) -> None:
        if self.words.device != device:
            for name in ("words", "limits", "pieces", "ends", "depth_change", "is_tag", "is_piece", "label"):
                setattr(self, name, getattr(self, name).to(device))

    def _state(self, input_ids: torch.LongTensor) -> _State:
        self._to(input_ids.device)
        rows, step = len(input_ids), input_ids.shape[1] - self.begin
        copies = rows // len(self.words)
        words, limits, pieces, ends = (
            tensor.repeat_interleave(copies, dim=0) for tensor in (self.words, self.limits, self.pieces, self.ends)
        )
        # Rows that the search has given up may hold anything: whatever is allowed there does not matter.
        ids = input_ids[:, self.begin :].clamp(max=len(self.label) - 1)
        changes = self.depth_change[ids]
        depths = changes.cumsum(dim=1)
        depth = changes.sum(dim=1)
        places = torch.arange(1, step + 1, device=ids.device)
        # The innermost open constituent is the last one whose opening has led to the present depth.
        opening = ((changes == 1) & (depths == depth[:, None])).long() * places
        last_other = ((changes != 1).long() * places).amax(dim=1) if step else depth
        if step:
            place = (opening.amax(dim=1) - 1).clamp(min=0)
            innermost = self.label[ids.gather(1, place[:, None])][:, 0]
        else:
            innermost = torch.full((rows,), -1, device=ids.device)
        tagged = self.is_tag[ids].sum(dim=1)
        missing = words - tagged
        written = self.is_piece[ids].sum(dim=1)
        # All tokens of a word come before its tag, and right after the tag of the word before.
        due = ends.gather(1, tagged.clamp(max=ends.shape[1] - 1)[:, None])[:, 0]
        following = pieces.gather(1, written.clamp(max=pieces.shape[1] - 1)[:, None])[:, 0]
        needed = ends[:, -1] - written + missing + depth + 1
        return _State(
            depth=depth,
            innermost=innermost,
            run=step - last_other,
            tagged=tagged,
            forced=following.masked_fill((written >= due) | (missing <= 0), -1),
            spare=limits - step - needed,
            single=words == 1,
            missing=missing,
        )

    def _allowed(self, state: _State) -> torch.Tensor:
        grammar, device = self.grammar, state.depth.device
        free, more = state.forced < 0, state.missing > 0
        begun = (state.depth > 0) | (state.tagged == 0)
        may_open = free & more & (state.spare >= 2) & (state.run < self.max_open_run) & begun
        may_tag = free & more & ((state.depth > 0) | state.single | ~may_open)
        may_close = free & (state.run == 0) & ((state.depth > 1) | ((state.depth == 1) & ~more))
        may_end = (state.depth == 0) & ~more
        return (
            (may_open[:, None] & grammar.opens.to(device))
            | (may_tag[:, None] & grammar.tags.to(device))
            | (may_close[:, None] & grammar.closes.to(device) & (grammar.labels.to(device) == state.innermost[:, None]))
            | (may_end[:, None] & grammar.ends.to(device))
        )

    def allowed(self, input_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens may follow each output.

        Args:
            input_ids: `(rows, length)`, the decoder's start counted; the rows of a sentence stand together.

        Returns:
            of the grammar's tokens, bool `(rows, tokens)` in the order of `grammar.ids`; and, `(rows,)`, the one token
            of a word that has to follow instead, -1 where none has to.
        """
        state = self._state(input_ids)
        return self._allowed(state), state.forced

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(rows, vocab_size)` with all but the allowed tokens ruled out."""
        allowed, forced = self.allowed(input_ids)
        ids = self.grammar.ids.to(scores.device)
        only = torch.full_like(scores, -torch.inf)
        only[:, ids] = scores[:, ids].masked_fill(~allowed, -torch.inf)
        if bool((forced >= 0).any()):
            # A word is given, so writing it costs nothing: else beams that put it off with more brackets stay ahead.
            kept = torch.full_like(scores, -torch.inf).scatter_(1, forced.clamp(min=0)[:, None], 0.0)
            only = torch.where((forced >= 0)[:, None], kept, only)
        return only


def _padded(rows: Sequence[Sequence[int]], filling: int) -> torch.Tensor:
    longest = max(1, *map(len, rows))
    return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows])
