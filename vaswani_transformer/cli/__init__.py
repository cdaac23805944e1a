"""The command `vaswani`: its options, what it prints, its exit statuses. The only room that prints.

Each command is a function whose parameters are its options, its docstring their help; the work itself is done by other
rooms. cyclopts makes the parser of it: unlike jsonargparse and Typer it takes `--ensemble A B C`, words after options,
a dataclass of fields without a prefix, and a mistake is one line.
"""
