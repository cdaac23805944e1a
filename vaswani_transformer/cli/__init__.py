"""The command `vaswani`: its options, what it prints, its exit statuses. The only room that prints.

Each command is a function whose parameters are its options, its docstring their help; the work itself is done by other
rooms. cyclopts makes the parser of it. A trial with `translate` and `train` on the same machine:
cyclopts 0.09 s and one line a field of a recipe; `--ensemble A B C`, words after options, one line for a mistake.
jsonargparse 0.14 s and `--recipe.warmup_steps`; no words after options, and twenty lines of usage for a mistake.
Typer 0.13 s and a parameter a field, written out; `--ensemble A` takes one folder, four lines for a mistake.
"""
