"""Files of any size, or streams, parsed sentence by sentence: written in order as it goes, with pictures if wanted."""

from pathlib import Path

from tqdm.auto import tqdm

from ..decoding.file_translator import FileTranslator
from ..decoding.streaming import WINDOW_LINES
from ..decoding.translator import PreparedWindow
from ..decoding.turns import WindowRecords
from ..errors import UserError
from ..files import write_text
from .parser import Parser
from .pictures import tree_svg, tree_text


class FileParser(FileTranslator):
    """Parses sentences, lists of words each, into an output: a tree a line, for a sentence without words a blank one.

    Args:
        parser: does the work.
        drawn: write trees drawn with lines, and a blank line after each, in place of brackets.
        pictures: folder that gets a picture of each tree, `NUMBER.svg`.
        window: sentences that are sorted by length together, and written together.

    Attributes:
        repaired: outputs of the model that were no trees over their words.
    """

    doing = "parsing"

    def __init__(self, parser: Parser, drawn: bool = False, pictures: Path | None = None, window: int = WINDOW_LINES):
        super().__init__(parser.translator, window=window)
        self.drawn, self.pictures, self.repaired = drawn, pictures, 0

    def _records(self, prepared: PreparedWindow, bar: tqdm) -> WindowRecords:
        window = prepared.window
        found = self.translator.translate_prepared(prepared, bar)
        records = []
        for number, (words, hypotheses) in enumerate(zip(window.lines, found, strict=True), window.first):
            parse = self.translator.read(words, hypotheses[0])
            self.repaired += not parse.well_formed
            if parse.tree is None:
                records.append("\n")
                continue
            if self.pictures is not None:
                write_text(self.pictures / f"{number:05}.svg", tree_svg(parse.tree))
            records.append((tree_text(parse.tree) + "\n" if self.drawn else str(parse.tree)) + "\n")
        if window.error is not None and not isinstance(window.error, UserError):
            raise window.error
        return WindowRecords(window.index, records, prepared.split, str(window.error) if window.error else None)
