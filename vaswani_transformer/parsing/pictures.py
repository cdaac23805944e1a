"""Trees drawn as text, a line for each node, and as SVG without external resources."""

import html
import re
import unicodedata

from .trees import Tree, unescape

_LETTER, _LEVEL, _GAP, _LINE, _COLUMN, _MARGIN = 7.5, 46, 18, 22, 74, 16  # pixels
_WIDEST = 1400  # pixels: where a tree from the top down would be wider, it is drawn from left to right
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # not allowed in XML
_STYLE = (
    "text{font:13px sans-serif;fill:#1a1a1a;paint-order:stroke;stroke:#fff;stroke-width:5px}"
    ".label{font-weight:600}.tag{fill:#666}line{stroke:#9a9a9a}line.word{stroke:#d0d0d0;stroke-dasharray:2 3}"
)


def tree_text(tree: Tree) -> str:
    """A tree drawn with lines, a line for each node, without a line break at the end.

    >>> print(tree_text(Tree("NP", (Tree("DT", word="the"), Tree("NN", word="dog")))))
    NP
    ├─ DT the
    └─ NN dog
    """
    lines: list[str] = []
    waiting = [(tree, "", "")]  # with what precedes the node's own line, and those of its children
    while waiting:
        node, before, indent = waiting.pop()
        word = "" if node.word is None else f" {unescape(node.word)}"
        lines.append(f"{before}{node.label}{word}")
        is_last = True
        for child in reversed(node.children):
            waiting.append((child, indent + ("└─ " if is_last else "├─ "), indent + ("   " if is_last else "│  ")))
            is_last = False
    return "\n".join(lines)


def text_width(text: str) -> float:
    """Approximate width of a text in the picture, in pixels; letters of East Asia count twice."""
    return _LETTER * sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


class _Drawing:
    """Lines and texts of a picture, from the top down with words in a row, or from left to right with words below."""

    def __init__(self, tree: Tree, down: bool):
        self.down, self.lines, self.texts = down, [], []
        self.depth, self.widths = _depth(tree), _widths(tree)
        self.along, self.widest_word = _MARGIN, 0.0  # where the next leaf starts; pixels
        self._place(tree, 0)
        self.along += _MARGIN

    def size(self) -> tuple[float, float]:
        """Width and height in pixels."""
        across = self._across(self.depth) + _MARGIN
        if self.down:
            return self.along, across + _LINE
        return across + self.widest_word + _GAP, self.along

    def _across(self, level: int) -> float:
        """Distance of a level's nodes from the top, or from the left."""
        return _MARGIN + level * (_LEVEL if self.down else _COLUMN) + (_LINE / 2 if self.down else _COLUMN / 2)

    def _leaf(self, leaf: Tree, level: int) -> tuple[float, float]:
        """Draw a word at the end of the sentence's row or column, and its tag at its level: no line crosses another."""
        word, end, across = unescape(leaf.word), self._across(self.depth), self._across(level)
        width = self.widths[id(leaf)] if self.down else _LINE
        along = self.along + width / 2
        self.along += width
        self._line((along, across), (along, end - (0 if self.down else _LETTER)), "word")
        self._text(*self._point(along, across), leaf.label, "tag")
        self._text(*self._point(along, end), word, "word", "middle" if self.down else "start")
        self.widest_word = max(self.widest_word, text_width(word))
        return along, across

    def _place(self, node: Tree, level: int) -> tuple[float, float]:
        """Draw a node; returns its place along the sentence and across it."""
        if node.word is not None:
            return self._leaf(node, level)
        places = []
        # Positive for a label that is wider than all its words.
        extra = max(0.0, self.widths[id(node)] - sum(self.widths[id(child)] for child in node.children))
        self.along += extra / 2 if self.down else 0
        for child in node.children:  # a comprehension would take twice as much of Python's stack
            places.append(self._place(child, level + 1))
        here = (places[0][0] + places[-1][0]) / 2, self._across(level)
        self.along += extra / 2 if self.down else 0
        for place in places:
            self._line(here, place, "branch")
        self._text(*self._point(*here), node.label, "label")
        return here

    def _line(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        (x1, y1), (x2, y2) = self._point(*start), self._point(*end)
        self.lines.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def _point(self, along: float, across: float) -> tuple[float, float]:
        return (along, across) if self.down else (across, along)

    def _text(self, x: float, y: float, text: str, kind: str, anchor: str = "middle") -> None:
        shown = html.escape(_NO_XML.sub("\ufffd", text))
        self.texts.append(f'<text class="{kind}" x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="{anchor}">{shown}</text>')


def _depth(tree: Tree) -> int:
    depth, level = 0, [tree]
    while level:
        depth, level = depth + 1, [child for node in level for child in node.children]
    return depth


def _widths(tree: Tree) -> dict[int, float]:
    """Width of each node in pixels, drawn from the top down, by its `id`."""
    widths: dict[int, float] = {}
    for node in reversed(list(tree.nodes())):
        if node.word is not None:
            widths[id(node)] = max(*map(text_width, (unescape(node.word), node.label)), 3 * _LETTER) + _GAP
        else:
            inner = sum(widths[id(child)] for child in node.children)
            widths[id(node)] = max(inner, text_width(node.label) + _GAP / 2)
    return widths


def tree_svg(tree: Tree) -> str:
    """A tree as an SVG document: from the top down, or, where that would be too wide to read, from left to right.

    Letters are 13 pixels high at its own width and height; in a page it scales with `width="100%"`.
    """
    drawing = _Drawing(tree, down=True)
    if drawing.size()[0] > _WIDEST:
        drawing = _Drawing(tree, down=False)
    width, height = (round(length) for length in drawing.size())
    title = html.escape(_NO_XML.sub("\ufffd", " ".join(map(unescape, tree.words()))))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join([*drawing.lines, *drawing.texts])
        + "\n</svg>\n"
    )
