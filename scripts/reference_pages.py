"""Fill the generated pages of the documentation: a hook of mkdocs.

The commands come from the command line's own parser, the fields of a recipe from its data class.
"""

import dataclasses

from vaswani_transformer.cli.main import make_app
from vaswani_transformer.recipes.recipe import Recipe


def commands() -> str:
    """Return every command and option, as Markdown."""
    return make_app().generate_docs(output_format="markdown", include_hidden=False, heading_level=2)


def recipe() -> str:
    """Return the fields of a recipe by their groups, as Markdown tables."""
    groups: dict[str, list[str]] = {}
    for field in dataclasses.fields(Recipe):
        text = field.metadata["help"].replace("|", "\\|")
        default = "" if field.default is None else f"`{field.default}`"
        groups.setdefault(field.metadata["group"], []).append(f"| `{field.name}` | {default} | {text} |")
    head = "| field | default | |\n|---|---|---|\n"
    return "\n\n".join(f"## {name.capitalize()}\n\n{head}" + "\n".join(rows) for name, rows in groups.items())


def on_page_markdown(markdown: str, **_) -> str:
    """Put the generated parts in the place of their marks."""
    for mark, make in (("<!-- commands -->", commands), ("<!-- recipe -->", recipe)):
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown
