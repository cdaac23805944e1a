"""Trees drawn as text, a line for each node, and as SVG without external resources."""

import html
import re
import unicodedata

from .trees import Tree, unescape

_CHARACTER, _LEVEL, _GAP, _LINE, _MARGIN = 7.5, 46, 18, 22, 16  # pixels
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # not allowed in XML
_STYLE = (
    "text{font:13px sans-serif;fill:#1a1a1a;paint-order:stroke;stroke:#fff;stroke-width:5px}"
    ".label{font-weight:600}.tag{fill:#666}line{stroke:#9a9a9a}line.word{stroke:#d0d0d0;stroke-dasharray:2 3}"
)


def tree_text(tree: Tree, indent: str = "") -> str:
    """Return a tree drawn with lines, a line for each node, without a line break at the end.

    `indent` comes before all lines but the first.

    >>> print(tree_text(Tree("NP", (Tree("DT", word="the"), Tree("NN", word="dog")))))
    NP
    ├─ DT the
    └─ NN dog
    """
    lines = [tree.label if tree.word is None else f"{tree.label} {unescape(tree.word)}"]
    for number, child in enumerate(tree.children, 1):
        branch, below = ("├─ ", "│  ") if number < len(tree.children) else ("└─ ", "   ")
        lines.append(indent + branch + tree_text(child, indent + below))
    return "\n".join(lines)


def text_width(text: str) -> float:
    """Return the approximate width of a text in the picture, in pixels; characters of East Asia count twice."""
    return _CHARACTER * sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def tree_svg(tree: Tree) -> str:
    """Return a tree as an SVG document, from the top down, with the words of the sentence in a row.

    Characters are 13 pixels high at its own width and height; in a page it scales with `width="100%"`.
    """
    lines, texts, right = [], [], float(_MARGIN)  # right: where what has been drawn ends
    bottom = _MARGIN + _LINE / 2 + _LEVEL * _depth(tree)

    def shown(text: str) -> str:
        return html.escape(_NO_XML.sub("\ufffd", text))

    def write(kind: str, text: str, x: float, y: float) -> None:
        texts.append(f'<text class="{kind}" x="{x:.1f}" y="{y + 4.5:.1f}" text-anchor="middle">{shown(text)}</text>')

    def connect(kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
        lines.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def draw(node: Tree, y: float, least: float = 3 * _CHARACTER) -> float:
        """Draw a node right of the others, its first word as wide as all labels above it; returns its label's x."""
        nonlocal right
        least = max(least, text_width(node.label))
        if node.word is not None:  # at its level the tag, so that no line crosses another
            width = max(least, text_width(unescape(node.word))) + _GAP
            right, x = right + width, right + width / 2
            connect("word", x, y, x, bottom)
            write("tag", node.label, x, y)
            write("word", unescape(node.word), x, bottom)
            return x
        first, *others = node.children
        below = [draw(first, y + _LEVEL, least), *(draw(child, y + _LEVEL) for child in others)]
        x = (below[0] + below[-1]) / 2
        for child_x in below:
            connect("branch", x, y, child_x, y + _LEVEL)
        write("label", node.label, x, y)
        return x

    draw(tree, _MARGIN + _LINE / 2)
    width, height = round(right + _MARGIN), round(bottom + _LINE + _MARGIN)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"<title>{shown(' '.join(map(unescape, tree.words())))}</title>\n<style>{_STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join([*lines, *texts]) + "\n</svg>\n"
    )


def _depth(tree: Tree) -> int:
    """Return the number of levels of a tree."""
    return 1 + max(map(_depth, tree.children), default=0)
