"""Templates of model cards, put into effect without their being able to run code, read files or never end.

A template of the user's own may come from a stranger. This file imports nothing of the package, because it is also a
program: `render_in_process` runs it in a Python process of its own, whose time and memory are bounded.
"""

import json
import subprocess
import sys

import jinja2
import jinja2.sandbox

MOST_CHARACTERS = 1 << 20  # of a template and of a card; the Hub's largest are far below
_SECONDS, _BYTES = 10, 1 << 30  # for a template of the user's own
# Without the current folder, from which Python (3.10 has no option -P) would import.
_START = "import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_path(sys.argv[1], None, '__main__')"
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
        message = "it takes too much memory" if isinstance(error, MemoryError) else message
        raise TemplateFault(f"line {line}: {message}" if line else message) from error
    return "".join(parts)


def render_in_process(folder: str, source: str, values: dict) -> str:
    """As `render`, in a process that ends after some seconds, and on POSIX when it wants too much memory.

    Raises:
        TemplateFault: as `render`, and for a template that takes too long or too much memory.
    """
    request = json.dumps([folder, source, values])
    command = [sys.executable, "-X", "utf8", "-c", _START, __file__]
    try:
        done = subprocess.run(command, input=request, capture_output=True, encoding="utf-8", timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise TemplateFault(f"it takes more than {_SECONDS} seconds") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        if done.returncode < 0 or "MemoryError" in done.stderr:
            raise TemplateFault(f"it takes more than {_BYTES >> 20:,} MiB of memory, or crashes") from None
        reason = " ".join(done.stderr.split())[-300:]
        raise TemplateFault(f"the Python process that fills it in failed: {reason}") from None
    if "fault" in answer:
        raise TemplateFault(answer["fault"])
    return answer["text"]


def _main() -> None:
    try:
        import resource  # POSIX only

        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    except (ImportError, ValueError, OSError):
        pass
    try:
        answer = {"text": render(*json.load(sys.stdin))}
    except TemplateFault as fault:
        answer = {"fault": str(fault)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
