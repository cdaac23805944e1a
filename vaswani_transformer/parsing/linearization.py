"""Trees as sequences of tokens and back, after Vinyals et al. (2015), "Grammar as a Foreign Language" ([37]).

`(ROOT (S (NP (PRP We)) (VP (VBP agree)) (. .)))` becomes `(S (NP PRP )NP (VP VBP )VP . )S`: a token that opens a
constituent and one that closes it, both with its label, and for each word its tag. The words themselves are left out,
since they are known, and so is the outer `ROOT`. Vinyals et al. write `XX` for every tag; `tags=False` does so here.
Unary chains and punctuation are written like everything else: nothing but the words is lost.

`with_words` is the other form: each word precedes the brackets between it and the word before it, so that the decoder
has the next word in its input when it decides which constituents to open and to close.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from .trees import MAX_DEPTH, ROOT, Tree

ANY_TAG = "XX"  # the one tag of trees without tags
TAG_END = ")"  # of tags among words: no word has a round bracket


def linearize(tree: Tree, tags: bool = True) -> list[str]:
    """Return the tokens of a cleaned tree, with or without `ROOT`; `tags=False` writes `XX` for every tag."""
    tokens = []
    for node, is_end in tree.walk():
        if node.word is not None:
            tokens.append(node.label if tags else ANY_TAG)
        elif node is not tree or node.label != ROOT:
            tokens.append((")" if is_end else "(") + node.label)
    return tokens


def with_words(tokens: Iterable[str], words: Sequence[str]) -> list[str]:
    """Return the tokens of a tree with its words, each right after the tag of the word before it.

    `(S (NP PRP )NP (VP VBP )VP . )S` becomes `We (S (NP PRP) agree )NP (VP VBP) . )VP .) )S`.
    """
    waiting = iter(words)
    mixed = list(islice(waiting, 1))
    for token in tokens:
        mixed += [token] if token.startswith(("(", ")")) else [token + TAG_END, *islice(waiting, 1)]
    return mixed


def without_words(tokens: Iterable[str]) -> list[str]:
    """Return the tokens that `with_words` added words to: all brackets and tags."""
    kept = (token for token in tokens if token.startswith(("(", ")")) or token.endswith(TAG_END))
    return [token if token.startswith(("(", ")")) else token.removesuffix(TAG_END) for token in kept]


def delinearize(tokens: Iterable[str], words: Sequence[str]) -> Tree:
    """Return a tree over exactly these words from any tokens; `delinearize(linearize(tree), tree.words())` is the tree.

    Other tokens are repaired: a closing bracket without an open one, tags beyond the last word, and brackets deeper
    than `MAX_DEPTH` are skipped; a closing bracket of an outer constituent closes those in it too; empty constituents
    are dropped; words without a tag are added at the end of the innermost open constituent, tagged `XX`; constituents
    that are open at the end are closed. Tokens are those of a tree if `linearize` gives them back.
    """
    stack: list[tuple[str, list[Tree]]] = [(ROOT, [])]
    used = 0

    def close() -> None:
        label, children = stack.pop()
        if children:
            stack[-1][1].append(Tree(label, tuple(children)))

    for token in tokens:
        if token.startswith("("):
            if len(stack) < MAX_DEPTH - 1:  # below `ROOT` and above the words
                stack.append((token[1:], []))
        elif token.startswith(")"):
            if any(label == token[1:] for label, _ in stack[1:]):
                while stack[-1][0] != token[1:]:
                    close()
                close()
        elif used < len(words):
            stack[-1][1].append(Tree(token, word=words[used]))
            used += 1
    stack[-1][1].extend(Tree(ANY_TAG, word=word) for word in words[used:])
    while len(stack) > 1:
        close()
    return Tree(ROOT, tuple(stack[0][1]))
