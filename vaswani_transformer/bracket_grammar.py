"""Decoding that writes nothing but trees: which tokens may follow, step by step, as a `LogitsProcessor`.

The state of an output is worked out from its tokens at every step, for all rows at once: how many constituents are
open, which label is the innermost one's, how many words have their tag. Nothing is remembered between steps, so beams
may change places as they like.
"""

from collections.abc import Mapping, Sequence

import torch
from transformers import LogitsProcessor

from .errors import UserError
from .linearization import NUMBERS, is_close, is_number, is_open

MAX_OPEN_RUN = 12  # constituents opened one right after the other; the Wall Street Journal and GUM have 8 at most


class BracketGrammar:
    """The tokens of trees, by what they do.

    Args:
        ids: id of each token that trees are written with, as from `tree_token_ids`.
        eos_token_id: the token that ends an output.
    """

    def __init__(self, ids: Mapping[str, int], eos_token_id: int):
        tokens = sorted(ids, key=ids.__getitem__)
        self.eos_token_id = eos_token_id
        #: Ids that an output may consist of, `(tokens,)`; the last one ends it. All other tensors go with these.
        self.ids = torch.tensor([*(ids[token] for token in tokens), eos_token_id])
        self.opens = torch.tensor([*map(is_open, tokens), False])
        self.closes = torch.tensor([*map(is_close, tokens), False])
        self.ends = torch.arange(len(self.ids)) == len(tokens)
        #: Which word each token is the number of; -1 for other tokens.
        self.numbers = torch.tensor([*(int(token[1:]) if is_number(token) else -1 for token in tokens), -1])
        self.has_numbers = bool((self.numbers >= 0).any())
        self.tags = ~(self.opens | self.closes | self.ends | (self.numbers >= 0))
        labels = {token[1:]: number for number, token in enumerate(filter(is_open, tokens))}
        #: Number of the label that a token opens or closes; -1 for other tokens.
        self.labels = torch.tensor([*(-1 if self._is_tag(token) else labels[token[1:]] for token in tokens), -1])

    @staticmethod
    def _is_tag(token: str) -> bool:
        return not (is_open(token) or is_close(token))

    def tokens_for(self, words: int) -> int:
        """What words take: a tag each, and its number where there are numbers."""
        return (1 + self.has_numbers) * words


class BracketProcessor(LogitsProcessor):
    """Rules out every token that leads away from a tree over the given words within the given length.

    After each step the rest of the tree still fits, and some token is always allowed: every output ends, whole. A tree
    has one constituent over all words (a single word may go without), and no more than `max_open_run` constituents that
    begin with nothing between them, which bounds unary chains.

    Args:
        grammar: the tokens.
        words: of each sentence of the batch.
        limits: tokens that each output may have, `</s>` counted; at least one more than its words (and numbers) take.
        max_open_run: see above.
        begin: tokens that the decoder is started with.

    Raises:
        UserError: for a sentence without words, or a limit that no tree keeps.
    """

    def __init__(
        self,
        grammar: BracketGrammar,
        words: Sequence[int],
        limits: Sequence[int],
        max_open_run: int = MAX_OPEN_RUN,
        begin: int = 1,
    ):
        self.grammar, self.max_open_run, self.begin = grammar, max_open_run, begin
        for count, limit in zip(words, limits, strict=True):
            if count < 1:
                raise UserError("a sentence without words has no tree: leave it out")
            if limit < (least := grammar.tokens_for(count) + 1):
                raise UserError(
                    f"a tree over {count} words takes at least {least} tokens and an output may have {limit}: raise"
                    " --max-new-tokens"
                )
        self.words, self.limits = torch.tensor(words), torch.tensor(limits)
        size = int(grammar.ids.max()) + 1
        # By id: +1 opens, -1 closes; 1 is a word's tag; number of the label that it opens; 1 is a word's number.
        self.depth_change = torch.zeros(size, dtype=torch.long)
        self.depth_change[grammar.ids] = grammar.opens.long() - grammar.closes.long()
        self.is_tag = torch.zeros(size, dtype=torch.long)
        self.is_tag[grammar.ids] = grammar.tags.long()
        self.label = torch.full((size,), -1)
        self.label[grammar.ids] = grammar.labels
        self.is_number = torch.zeros(size, dtype=torch.bool)
        self.is_number[grammar.ids] = grammar.numbers >= 0

    def _to(self, device: torch.device) -> None:
        if self.words.device != device:
            for name in ("words", "limits", "depth_change", "is_tag", "label", "is_number"):
                setattr(self, name, getattr(self, name).to(device))

    def allowed(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """Which of the grammar's tokens may follow each output.

        Args:
            input_ids: `(rows, length)`, the decoder's start counted; the rows of a sentence stand together.

        Returns:
            bool `(rows, tokens)`, in the order of `grammar.ids`.
        """
        self._to(input_ids.device)
        rows, step = len(input_ids), input_ids.shape[1] - self.begin
        copies = rows // len(self.words)
        words, limits = self.words.repeat_interleave(copies), self.limits.repeat_interleave(copies)
        # Rows that the search has given up may hold anything: whatever is allowed there does not matter.
        ids = input_ids[:, self.begin :].clamp(max=len(self.label) - 1)
        changes = self.depth_change[ids]
        depths = changes.cumsum(dim=1)
        depth = changes.sum(dim=1)
        places = torch.arange(1, step + 1, device=ids.device)
        # The innermost open constituent is the last one whose opening has led to the present depth.
        opening = ((changes == 1) & (depths == depth[:, None])).long() * places
        last_other = ((changes != 1).long() * places).amax(dim=1) if step else depth
        run = step - last_other
        if step:
            place = (opening.amax(dim=1) - 1).clamp(min=0)
            innermost = self.label[ids.gather(1, place[:, None])]
        else:
            innermost = torch.full((rows, 1), -1, device=ids.device)
        used = self.is_tag[ids].sum(dim=1)
        missing = words - used
        # After a word's number comes its tag.
        tag_now = self.is_number[ids[:, -1]] if step else torch.zeros_like(missing, dtype=torch.bool)
        needed = self.grammar.tokens_for(missing) - tag_now.long() + depth + 1
        spare = limits - step - needed  # tokens beyond those that finish the tree from here
        more = (missing > 0) & ~tag_now
        may_open = more & (spare >= 2) & (run < self.max_open_run) & ((depth > 0) | (step == 0))
        may_tag = more & ((depth > 0) | (words == 1) | ~may_open)
        may_close = (run == 0) & ~tag_now & ((depth > 1) | ((depth == 1) & ~more))
        may_end = (depth == 0) & ~more & ~tag_now
        grammar, device = self.grammar, ids.device
        may_write = tag_now if grammar.has_numbers else may_tag
        return (
            (may_open[:, None] & grammar.opens.to(device))
            | (may_write[:, None] & grammar.tags.to(device))
            | (may_tag[:, None] & (grammar.numbers.to(device) == (used % len(NUMBERS))[:, None]))
            | (may_close[:, None] & grammar.closes.to(device) & (grammar.labels.to(device) == innermost))
            | (may_end[:, None] & grammar.ends.to(device))
        )

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(rows, vocab_size)` with all but the allowed tokens ruled out."""
        ids = self.grammar.ids.to(scores.device)
        kept = scores[:, ids].masked_fill(~self.allowed(input_ids), -torch.inf)
        only = torch.full_like(scores, -torch.inf)
        only[:, ids] = kept
        return only
