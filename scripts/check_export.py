"""How exported models translate beside the model itself: outputs, log-probabilities and scores, sentence by sentence.

    python scripts/check_export.py MODEL --source FILE [--reference FILE] [--lines 200] [--formats ctranslate2 onnx]

With a reference BLEU is computed too. An output of a float32 engine that differs is called a tie where the model itself
gives it when each of its weights is changed by at most a 1e-6th: it hangs on rounding. Sentences of one length go
together, so that no padding and no other sentence matters.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path

import torch

from vaswani_transformer import load_model, score_pairs
from vaswani_transformer.data.text_files import read_lines
from vaswani_transformer.export.exporting import export_model

ROUNDING, TRIALS = 1e-6, 20


class Reference:
    """What the model itself does with the sentences."""

    def __init__(self, model, sources: list[list[int]]):
        self.model, self.sources = model, sources
        self.groups = defaultdict(list)
        for index, source in enumerate(sources):
            self.groups[len(source)].append(index)

    @torch.no_grad()
    def generate(self, beams: int) -> tuple[list[list[list[int]]], list[list[float]]]:
        """All final hypotheses of every sentence, best first, ended by `</s>`; and their scores."""
        outputs, scores = [[] for _ in self.sources], [[] for _ in self.sources]
        for indices in self.groups.values():
            batch = torch.tensor([self.sources[index] for index in indices])
            done = self.model.generate(
                input_ids=batch, num_beams=beams, num_return_sequences=beams, output_scores=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            rows = [strip(row, self.model.config) for row in done.sequences.tolist()]
            for place, index in enumerate(indices):
                outputs[index] = rows[place * beams : (place + 1) * beams]
                if beams > 1:
                    scores[index] = done.sequences_scores[place * beams : (place + 1) * beams].tolist()
        return outputs, scores

    @torch.no_grad()
    def log_probability(self, index: int, output: list[int]) -> torch.Tensor:
        """Of each token of an output, given its source."""
        labels = torch.tensor([output])
        inputs = self.model.prepare_decoder_input_ids_from_labels(labels)
        logits = self.model(input_ids=torch.tensor([self.sources[index]]), decoder_input_ids=inputs).logits
        return logits.log_softmax(dim=-1).gather(-1, labels[..., None])[0, :, 0]

    def is_tie(self, index: int, output: list[int], beams: int) -> bool:
        """Whether the model itself gives this output when its weights are changed by rounding errors."""
        weights = [parameter.clone() for parameter in self.model.parameters()]
        generator = torch.Generator().manual_seed(0)
        source = torch.tensor([self.sources[index]])
        found = False
        for _ in range(TRIALS):
            with torch.no_grad():
                for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                    noise = torch.rand(weight.shape, generator=generator) * 2 - 1
                    parameter.copy_(weight * (1 + ROUNDING * noise))
                row = self.model.generate(input_ids=source, num_beams=beams)[0].tolist()
            if found := strip(row, self.model.config) == output:
                break
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
        return found


def strip(row: list[int], config) -> list[int]:
    """Generated tokens up to the first end token, without the start token and what fills the row."""
    row = row[1:]
    return row[: row.index(config.eos_token_id) + 1] if config.eos_token_id in row else row


def agreement(reference: Reference, ours, theirs, beams: int, with_ties: bool) -> dict:
    """How many outputs are the same, and how many of the others are ties."""
    differ = [index for index, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
    row = {"of": len(ours), "identical": len(ours) - len(differ)}
    if with_ties:
        row["ties"] = sum(reference.is_tie(index, theirs[index], beams) for index in differ)
        row["different"] = len(differ) - row["ties"]
    return row


def bleu(tokenizer, outputs, references) -> float | None:
    """Of outputs as token ids, by sacreBLEU."""
    import sacrebleu

    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return None if references is None else round(sacrebleu.corpus_bleu(texts, [references]).score, 2)


def timed(function, *arguments, **options):
    """What a function returns, and the seconds that it took."""
    start = time.perf_counter()
    result = function(*arguments, **options)
    return result, round(time.perf_counter() - start, 2)


def check_ctranslate2(arguments, reference, tokenizer, ours, references, folder: Path) -> list[dict]:
    """Rows of the report for CTranslate2, float32 and the quantizations asked for."""
    from vaswani_transformer.export.ctranslate2_model import CTranslate2Model

    (greedy, _), (beams, scores) = ours
    texts = [tokenizer.decode(source, skip_special_tokens=True) for source in reference.sources]
    targets = references or tokenizer.batch_decode([outputs[0] for outputs in beams], skip_special_tokens=True)
    rows = []
    for quantization in ("float32", *arguments.quantization):
        export_model(arguments.model, folder / quantization, "ctranslate2", quantization)
        for name, wanted, options in (
            ("greedy", 1, {}),
            ("beam 4, patience 1", 4, {"patience": 1}),
            ("beam 4", 4, {}),
        ):
            model = CTranslate2Model(folder / quantization, threads=arguments.threads, **options)
            found, seconds = timed(model.search, reference.sources, wanted, num_beams=wanted)
            best = [outputs[0].ids for outputs in found]
            expected = [outputs[0] for outputs in (greedy if wanted == 1 else beams)]
            row = {"engine": f"ctranslate2 {quantization}", "search": name, "seconds": seconds}
            row |= agreement(reference, expected, best, wanted, quantization == "float32")
            if wanted > 1:
                pairs = list(zip(found, beams, strict=True))
                row["whole n-best identical"] = sum([item.ids for item in one] == other for one, other in pairs)
                row["largest score difference where identical"] = max(
                    abs(one[0].score - theirs[0])
                    for (one, other), theirs in zip(pairs, scores, strict=True)
                    if one[0].ids == other[0]
                )
            row["bleu"] = bleu(tokenizer, best, references)
            rows.append(row)
        losses, _ = score_pairs(model, tokenizer, texts, targets)
        differences = [
            abs(-loss - float(reference.log_probability(index, tokenizer(target)["input_ids"]).sum()))
            for index, (loss, target) in enumerate(zip(losses, targets, strict=True))
        ]
        rows.append({
            "engine": f"ctranslate2 {quantization}", "search": "scores of given pairs", "of": len(differences),
            "largest difference of a sentence's log-probability": max(differences),
        })  # fmt: skip
    return rows


def check_onnx(arguments, reference, tokenizer, ours, references, folder: Path) -> list[dict]:
    """Rows of the report for ONNX: greedy search, and logits of the model's own outputs."""
    from translate_onnx import OnnxTranslator

    from vaswani_transformer.export.facts import ExportFacts
    from vaswani_transformer.export.to_onnx import decode_in_parts

    (greedy, _), _ = ours
    done = export_model(arguments.model, folder / "onnx", "onnx")
    facts = ExportFacts.read(done.folder)
    translator = OnnxTranslator(done.folder, threads=arguments.threads)

    def search():
        outputs = [None] * len(greedy)
        for indices in reference.groups.values():
            for index, output in zip(indices, translator.greedy([reference.sources[i] for i in indices]), strict=True):
                outputs[index] = output
        return outputs

    outputs, seconds = timed(search)
    expected = [outputs[0] for outputs in greedy]
    row = {"engine": "onnxruntime float32", "search": "greedy", "seconds": seconds}
    row |= agreement(reference, expected, outputs, 1, True) | {"bleu": bleu(tokenizer, outputs, references)}
    differences = []
    for index in range(min(20, len(greedy))):
        source, labels = torch.tensor([reference.sources[index]]), torch.tensor([greedy[index][0]])
        inputs = reference.model.prepare_decoder_input_ids_from_labels(labels)
        with torch.no_grad():
            logits = reference.model(input_ids=source, decoder_input_ids=inputs).logits
        arrays = source.numpy(), torch.ones_like(source).numpy(), inputs.numpy()
        theirs = torch.from_numpy(decode_in_parts(done.folder, *arrays, facts))
        differences.append((logits - theirs).abs().max())
    worst = float(torch.stack(differences).max())  # NaN if one of them is
    return [row, {"engine": "onnxruntime float32", "search": "given outputs", "largest difference of a logit": worst}]


def main() -> None:
    """Print one JSON object a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--source", required=True, help="sentences, plain or .gz")
    parser.add_argument("--reference", help="their translations, for BLEU and for the pairs that are scored")
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--formats", nargs="+", choices=("ctranslate2", "onnx"), default=["ctranslate2", "onnx"])
    parser.add_argument("--quantization", nargs="*", default=["int8"], help="besides float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_model(arguments.model, "cpu")
    lines = [line.strip() for line in islice(read_lines(Path(arguments.source)), arguments.lines)]
    references = None
    if arguments.reference:
        references = [line.strip() for line in islice(read_lines(Path(arguments.reference)), arguments.lines)]
    reference = Reference(model, tokenizer(lines)["input_ids"])
    ours = []
    for beams in (1, 4):
        result, seconds = timed(reference.generate, beams)
        ours.append(result)
        row = {"engine": "model float32", "search": "greedy" if beams == 1 else "beam 4", "seconds": seconds}
        row["bleu"] = bleu(tokenizer, [outputs[0] for outputs in result[0]], references)
        print(json.dumps(row), flush=True)
    checks = {"ctranslate2": check_ctranslate2, "onnx": check_onnx}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.formats:
            for row in checks[name](arguments, reference, tokenizer, ours, references, Path(folder)):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
