"""`vaswani experiment` in this process."""

from vaswani_transformer.cli import main


def experiment(capsys, *words: str) -> tuple[int, str, str]:
    """Status, output and errors of `vaswani experiment`."""
    status = main(["experiment", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err
