"""How many requests a second `vaswani serve` answers, and how soon, beside other servers of the same model.

    python scripts/benchmarks/serving.py MODEL --sentences test.en.gz --seconds 20
    python scripts/benchmarks/serving.py MODEL --sentences test.en.gz --soak 3600    # is its memory flat?

Each client sends a sentence, waits for the translation, and sends the next one. All servers run at the same time, of
which one works: they take turns several times, so that what disturbs the machine disturbs all of them. Clients run on
the same machine. "batched" is `vaswani serve`, "one at a time" the same with a single sentence in its search,
"CTranslate2" the plainest FastAPI program around its `translate_batch` (its own search with as many beams, which is not
quite ours), and "no server" the model itself in a loop, which is what a lone request can hope for.
"""

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import psutil
import torch

from vaswani_transformer import Translator, export_model
from vaswani_transformer.experiments.base import markdown_table

# The arguments are the exported folder, its tokenizer's and the number of beams.
PLAIN = """
    import socket, sys
    import ctranslate2, uvicorn
    from fastapi import Body, FastAPI
    from vaswani_transformer import load_tokenizer

    folder, tokenizer, beams = sys.argv[1], load_tokenizer(sys.argv[2]), int(sys.argv[3])
    translator, app = ctranslate2.Translator(folder), FastAPI()

    @app.post("/translate")
    def translate(q: str = Body(embed=True)):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(q)["input_ids"])
        best = translator.translate_batch([tokens], beam_size=beams)[0].hypotheses[0]
        return {"translatedText": tokenizer.decode(tokenizer.convert_tokens_to_ids(best), skip_special_tokens=True)}

    config = uvicorn.Config(app, port=0, log_level="error")
    server = socket.create_server(("127.0.0.1", 0))
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `vaswani serve`: without it an answer waits 40 ms
    print(f"serving at http://127.0.0.1:{server.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[server])
"""


@contextlib.contextmanager
def started(command: list, threads: int) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server's process and its port, which its first line ends with."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process, int(process.stdout.readline().rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()


async def post(reader, writer, text: str) -> str:
    """What a server translates a text to."""
    body = json.dumps({"q": text, "source": "auto", "target": "xx"}).encode()
    head = (
        f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
    answer = await reader.readexactly(length)
    if " 200 " not in lines[0]:
        raise RuntimeError(f"{lines[0]}: {answer.decode()}")
    return json.loads(answer)["translatedText"]


async def load(port: int, sentences: Iterator[str], clients: int, seconds: float) -> tuple[list[float], int]:
    """The seconds that each request of so many clients took, and how many were answered within these seconds."""
    times, answered, end = [], 0, perf_counter() + seconds

    async def ask() -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (start := perf_counter()) < end:
            await post(reader, writer, next(sentences))
            times.append(perf_counter() - start)
            answered += perf_counter() < end  # the last request of each client goes beyond it
        writer.close()

    await asyncio.gather(*(ask() for _ in range(clients)))
    return times, answered


def lone(translator: Translator, sentences: Iterator[str], seconds: float) -> list[float]:
    """The seconds that the model itself takes for each sentence."""
    times, end = [], perf_counter() + seconds
    while (start := perf_counter()) < end:
        list(translator.translate([next(sentences)]))
        times.append(perf_counter() - start)
    return times


def row(name: str, precision: str, clients: int, times: list[float], rate: float) -> list[str]:
    """A row of the table."""
    ordered = sorted(times)
    shares = [1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)]
    return [name, precision, str(clients), f"{rate:.1f}", *(f"{share:.1f}" for share in shares)]


def compare(arguments: argparse.Namespace, sentences: list[str]) -> None:
    """Print the table."""
    times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    answered: dict[tuple[str, str, int], int] = defaultdict(int)
    with contextlib.ExitStack() as stack:
        folder, ports, alone = stack.enter_context(tempfile.TemporaryDirectory()), {}, {}
        for precision in arguments.precision:
            command = ["-m", "vaswani_transformer", "serve", f"en-xx={arguments.model}", "--port", 0]
            command += ["--precision", precision, "--device", "cpu"]
            commands = {"batched": command, "one at a time": [*command, "--tokens-per-batch", 1]}
            exported = f"{folder}/{precision}"
            export_model(arguments.model, exported, quantization=precision)
            model, tokenizer = prepared(arguments.model, precision)
            beams = model.generation_config.num_beams or 1
            commands["CTranslate2"] = ["-c", textwrap.dedent(PLAIN), exported, arguments.model, beams]
            alone[precision] = Translator(model, tokenizer)
            for name, words in commands.items():
                ports[name, precision] = stack.enter_context(started(words, arguments.threads))[1]
        for port in ports.values():
            asyncio.run(load(port, itertools.cycle(sentences), 8, 1.0))  # it loads its model
        torch.set_num_threads(arguments.threads)  # here: CTranslate2 has set it
        part = arguments.seconds / arguments.rounds
        for _ in range(arguments.rounds):
            for precision, translator in alone.items():
                found = lone(translator, itertools.cycle(sentences), part)
                times["no server", precision, 1] += found
                answered["no server", precision, 1] += len(found)
            for (name, precision), clients in itertools.product(ports, arguments.clients):
                found, number = asyncio.run(load(ports[name, precision], itertools.cycle(sentences), clients, part))
                times[name, precision, clients] += found
                answered[name, precision, clients] += number
    rows = [
        row(*key, found, answered[key] / arguments.seconds)
        for key, found in sorted(times.items(), key=lambda item: item[0][1:])
    ]
    print(markdown_table(["server", "precision", "clients", "requests/s", "p50 ms", "p95 ms", "p99 ms"], rows))


def prepared(folder: str, precision: str):
    """A model as `vaswani serve` prepares it, and its tokenizer."""
    from vaswani_transformer.export.engine import load_for_decoding

    return load_for_decoding(folder, "cpu", precision)


def soak(arguments: argparse.Namespace, sentences: list[str]) -> None:
    """Print the memory of a server under load, ten times, as it is measured."""
    command = ["-m", "vaswani_transformer", "serve", f"en-xx={arguments.model}", "--port", 0, "--device", "cpu"]
    command += ["--timeout", 600]  # another program may keep the processor for a while
    answered = 0
    print("| seconds | requests | memory, MiB |\n| --- | --- | --- |", flush=True)
    with started(command, arguments.threads) as (process, port):
        texts = itertools.cycle([*sentences, " ".join(sentences[:50])])
        asyncio.run(load(port, texts, 8, 1.0))
        for number in range(1, 11):
            answered += len(asyncio.run(load(port, texts, 8, arguments.soak / 10))[0])
            memory = psutil.Process(process.pid).memory_info().rss / 2**20
            print(f"| {number * arguments.soak / 10:.0f} | {answered} | {memory:.0f} |", flush=True)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder")
    parser.add_argument("--sentences", required=True, help="file with a sentence on each line, also .gz")
    parser.add_argument("--seconds", type=float, default=20, help="for each row of the table")
    parser.add_argument("--rounds", type=int, default=4, help="turns that the servers take")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--precision", nargs="+", default=["float32", "int8"])
    parser.add_argument("--threads", type=int, default=1, help="of each server's model")
    parser.add_argument("--soak", type=float, help="seconds of load on one server, instead of the table")
    arguments = parser.parse_args()
    path = Path(arguments.sentences)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        sentences = [line.strip() for line in file if line.strip()]
    (compare if arguments.soak is None else soak)(arguments, sentences)


if __name__ == "__main__":
    main()
