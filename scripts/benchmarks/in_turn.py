"""Processes that are asked the same in turn and in random order, so that all are measured on the same machine."""

import multiprocessing
import random
import sys
from collections.abc import Callable
from typing import Any


class InTurn:
    """One process for each contestant, so that none profits from what another changes in its process.

    Args:
        target: what a process does with its arguments and then a connection: send one answer when it is ready, and one
            to whatever it receives, up to None.
        arguments: by a contestant's name.
    """

    def __init__(self, target: Callable, arguments: dict[str, tuple]):
        context = multiprocessing.get_context("spawn")  # a process that starts from nothing, with threads of its own
        self.ready: dict[str, Any] = {}  # the first answers
        self._ends, self._processes = {}, []
        for name, own in arguments.items():
            self._ends[name], other = context.Pipe()
            process = context.Process(target=target, args=(*own, other), daemon=True)
            process.start()
            self._processes.append(process)
            other.close()
            self.ready[name] = self._receive(name)
            print(f"{name}: ready", file=sys.stderr)

    def _receive(self, name: str) -> Any:
        try:
            return self._ends[name].recv()
        except EOFError:
            for process in self._processes:
                process.terminate()
            sys.exit(f"error: the process of {name} ended")

    def rounds(self, question: Any, rounds: int, first: Any = None) -> dict[str, list]:
        """The answers of each, one a round, after a round that does not count, in which `first` may be asked."""
        answers = {name: [] for name in self._ends}
        for turn in range(rounds + 1):
            print(f"round {turn} of {rounds}", file=sys.stderr)
            for name in random.sample(list(self._ends), len(self._ends)):
                self._ends[name].send(question if turn or first is None else first)
                answer = self._receive(name)
                if turn:
                    answers[name].append(answer)
        return answers

    def close(self) -> None:
        """Let all processes end."""
        for end in self._ends.values():
            end.send(None)
        for process in self._processes:
            process.join()
