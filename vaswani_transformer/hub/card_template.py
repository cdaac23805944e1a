"""Templates of model cards, put into effect without their being able to run code or read files.

A template of the user's own may come from a stranger.
"""

import jinja2
import jinja2.sandbox

MOST_CHARACTERS = 1 << 20  # of a template and of a card; the Hub's largest are far below
_NAME = "<template>"  # what jinja2 names a template that is not a file


class TemplateFault(Exception):
    """What is wrong with a template, in one line, with its line if it is known."""


def render(folder: str, source: str, values: dict) -> str:
    """The text that a template makes of values.

    Args:
        folder: templates that it may extend or include, and no other file.
        source: the template.
        values: names to strings, numbers, lists and dictionaries.

    Raises:
        TemplateFault: for a mistake in the template, something that it may not do, or more than `MOST_CHARACTERS`.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the values are Markdown already
    )
    parts, characters = [], 0
    try:
        for part in environment.from_string(source).generate(values):
            parts.append(part)
            characters += len(part)
            if characters > MOST_CHARACTERS:
                raise TemplateFault(f"it makes a card of more than {MOST_CHARACTERS:,} characters")
    except TemplateFault:
        raise
    except Exception as error:  # what a template computes raises errors of every kind
        line, trace = getattr(error, "lineno", None), error.__traceback__
        while trace is not None:  # jinja2 gives its frames the template's lines
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == _NAME else line
            trace = trace.tb_next
        message = " ".join(str(error).split())[:300] or type(error).__name__
        raise TemplateFault(f"line {line}: {message}" if line else message) from error
    return "".join(parts)
