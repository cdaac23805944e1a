"""Time and memory of commands from start to end, beside bare scripts of the libraries that do the same.

    python scripts/benchmarks/cold_start.py MODEL [--exported FOLDER] [--runs 7]

MODEL is a model folder; --exported one that `vaswani export` wrote, for the rows of CTranslate2. Each program runs
several times in processes of its own, all programs in turn; medians are printed as JSON lines. Processor time is that
of all threads, user and system, as the system counts it for a child that has ended; memory is the most that it held at
once. A server ends when it has answered one request, and its time by the clock is that from its start to the answer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from time import perf_counter
from urllib.request import Request, urlopen

SENTENCE = "Two dogs play in the snow."
TORCH = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
import vaswani_transformer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
output = model.generate(**tokenizer([sys.argv[2]], return_tensors="pt"))
print(tokenizer.batch_decode(output, skip_special_tokens=True)[0])
"""
CTRANSLATE2 = """
import sys, ctranslate2, tokenizers
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
translator = ctranslate2.Translator(sys.argv[1])
[result] = translator.translate_batch([tokenizer.encode(sys.argv[2]).tokens], beam_size=4)
print(tokenizer.decode([tokenizer.token_to_id(token) for token in result.hypotheses[0]]))
"""


def measure(command: list[str]) -> tuple[float, float, float]:
    """Return seconds of the processor, seconds by the clock and MB of memory of a program that has ended."""
    start = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, seconds = process.stdout.readline(), None
    if "serve" in command:
        body = json.dumps({"q": SENTENCE, "source": "auto", "target": "xx"}).encode()
        urlopen(Request(output.split()[-1] + "/translate", body, {"Content-Type": "application/json"})).close()
        seconds = perf_counter() - start
        process.terminate()
    output += process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):  # 2: a wrong option
        sys.exit(output)
    return usage.ru_utime + usage.ru_stime, seconds or perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    """Print a line for each program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--exported", metavar="FOLDER")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    vaswani = [sys.executable, "-m", "vaswani_transformer"]
    programs = {
        "vaswani --help": [*vaswani, "--help"],
        "vaswani recipes": [*vaswani, "recipes"],
        "wrong option": [*vaswani, "translate", "MODEL", "--beems", "2"],
        "vaswani translate": [*vaswani, "translate", arguments.model, SENTENCE],
        "torch + transformers": [sys.executable, "-c", TORCH, arguments.model, SENTENCE],
    }
    if arguments.exported:
        programs["vaswani translate, exported"] = [*vaswani, "translate", arguments.exported, SENTENCE]
        programs["vaswani serve, exported"] = [*vaswani, "serve", f"en-xx={arguments.exported}", "--port", "0"]
        programs["ctranslate2 + tokenizers"] = [sys.executable, "-c", CTRANSLATE2, arguments.exported, SENTENCE]
    runs = [{name: measure(command) for name, command in programs.items()} for _ in range(arguments.runs)]
    for name in programs:
        values = (round(statistics.median(run[name][index] for run in runs), 3) for index in range(3))
        print(json.dumps({"program": name, **dict(zip(("processor, s", "clock, s", "MB"), values, strict=True))}))


if __name__ == "__main__":
    main()
