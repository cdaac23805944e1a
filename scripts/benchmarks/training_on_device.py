"""One training of ours, measured by the device's clock, and a profile of where its time goes.

`train_ours` trains through `VaswaniTrainer` with a line of the log every 50 steps. After some steps that do not count,
the time of `steps` steps is taken between two events of the device, so that nothing waits for it in between; then some
further steps are profiled. On a CPU the clock is the host's, so that all of this is tested without a GPU.
"""

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path

import torch

# Name, and what differs from eager mode with padded batches.
ROWS = {
    "padded, eager": {},
    "padded, compiled": {"compiled": True},
    "without padding, eager": {"padding_free": True},
    "without padding, compiled": {"padding_free": True, "compiled": True},
}
# The first pattern that is found in a kernel's name (on a CPU: an operation's) tells its kind.
KINDS = {
    "attention": r"flash|fmha|attn|attention",
    "loss": r"differentiate_in_place|^_kernel$|softmax|nll",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|\bmm\b|::mm|addmm|bmm|matmul|linear",
    "optimizer": r"adam|multi_tensor|foreach",
    "fused by torch.compile": r"^triton_|cpp_fused",
    "layer norm": r"layer_norm|layernorm|GammaBeta",
    "dropout": r"dropout|bernoulli|random",
    "embeddings": r"embedding|index|gather|scatter",
    "copies and casts": r"copy|memcpy|memset|fill|zero|cat",
    "communication": r"nccl|all_reduce",
    "other element-wise": r"elementwise|reduce|::",
}


class Stopwatch:
    """Seconds between `start` and `stop`, by events of a GPU or by the host's clock."""

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"

    def _now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """The clock runs from what the device has been given so far."""
        self.begun = self._now()

    def stop(self) -> float:
        """Waits for the device."""
        ended = self._now()
        if not self.on_gpu:
            return ended - self.begun
        ended.synchronize()
        return self.begun.elapsed_time(ended) / 1000


def kind_of(name: str) -> str:
    """The kind of a kernel, or of an operation on a CPU."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def summarise(profiled, on_gpu: bool) -> dict[str, float]:
    """Seconds of each kind, the longest first."""
    seconds = Counter()
    for event in profiled.events():
        if on_gpu:
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                seconds[kind_of(event.name)] += event.self_device_time_total / 1e6
        elif event.name.startswith("aten::"):
            seconds[kind_of(event.name)] += event.self_cpu_time_total / 1e6
    return dict(seconds.most_common())


def draw(seconds: dict[str, float], steps: int, title: str, path: Path) -> None:
    """A bar for each kind: milliseconds of a step."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(8, 0.4 * len(seconds) + 1.2))
    axes, total = figure.add_subplot(), sum(seconds.values())
    bars = axes.barh(list(seconds), [1000 * value / steps for value in seconds.values()])
    axes.bar_label(bars, [f" {value / total:.0%}" for value in seconds.values()])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="ms of a step", title=title)
    figure.savefig(path, dpi=150)


def measuring_callback(options: argparse.Namespace, folder: Path, name: str, results: dict):
    """What takes the time of some steps of a training, profiles further ones, and ends it."""
    from torch.profiler import profile
    from transformers import TrainerCallback

    on_gpu = options.device == "cuda"
    first, last = options.warm_up_steps, options.warm_up_steps + options.steps

    class Measure(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == first:
                self.tokens, self.positions = self.trainer.tokens_seen.copy(), self.trainer.positions_seen.copy()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                self.stopwatch = Stopwatch(options.device)
                self.stopwatch.start()
            elif state.global_step == last:
                results["seconds"] = self.stopwatch.stop()
                tokens = self.trainer.tokens_seen - self.tokens
                positions = self.trainer.positions_seen - self.positions
                results["source_tokens"], results["target_tokens"] = tokens.tolist()
                results["padding"] = 1 - float(tokens.sum() / positions.sum())
                results["memory"] = torch.cuda.max_memory_allocated() if on_gpu else 0
                self.profiled = profile()
                self.profiled.__enter__()
            elif state.global_step == last + options.profiled_steps:
                if on_gpu:
                    torch.cuda.synchronize()
                self.profiled.__exit__(None, None, None)
                file = f"{options.preset or 'model'}-{name}".replace(", ", "-").replace(" ", "-")
                results["kinds"] = summarise(self.profiled, on_gpu)
                self.profiled.export_chrome_trace(str(folder / f"{file}.json.gz"))
                draw(results["kinds"], options.profiled_steps, f"{options.preset or ''} {name}", folder / f"{file}.png")
                control.should_training_stop = True

    return Measure()


def train_ours(options: argparse.Namespace, folder: Path, name: str, model_config) -> None:
    """Train, and print the results as a line of JSON; pictures and traces go to `options.pictures`."""
    import datasets

    from vaswani_transformer import VaswaniForConditionalGeneration
    from vaswani_transformer.data.tokenization import load_tokenizer
    from vaswani_transformer.hardware import default_num_workers
    from vaswani_transformer.training.trainer import VaswaniTrainer, VaswaniTrainingArguments

    row, results = ROWS[name], {}
    pictures = Path(options.pictures or folder)
    pictures.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as `vaswani train` does
    torch.manual_seed(options.seed)
    model = VaswaniForConditionalGeneration(model_config)
    model.set_attn_implementation("sdpa" if options.device == "cuda" else "eager")
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.is_compiled = row.get("compiled", False)
    arguments = VaswaniTrainingArguments(
        output_dir=str(folder / "output"),
        tokens_per_batch=options.batch_tokens,
        tokens_per_device=options.device_tokens or options.batch_tokens,
        padding_free=row.get("padding_free", False),
        max_steps=options.warm_up_steps + options.steps + options.profiled_steps + 1,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=default_num_workers(),  # as `vaswani train` has
        bf16=True,
        optim="adamw_torch_fused",
        use_cpu=options.device == "cpu",
        seed=options.seed,
    )
    measure = measuring_callback(options, pictures, name, results)
    pairs = datasets.load_from_disk(folder / "pairs")
    tokenizer = load_tokenizer(folder / "tokenizer")
    trainer = VaswaniTrainer(model, arguments, train_dataset=pairs, processing_class=tokenizer, callbacks=[measure])
    measure.trainer = trainer
    trainer.train()
    print(json.dumps(results))


def table(rows: dict[str, list[dict]], peak: dict[str, float], flops: float, options: argparse.Namespace) -> str:
    """The results in Markdown: the round of the median speed, and where its time goes."""
    lines = [
        f"Matrix products in bf16: {peak['bfloat16'] / 1e12:,.3g} TFLOP/s ({options.device}, torch"
        f" {torch.__version__}); {flops / 1e9:,.3g} GFLOP a target token, padding left out. {options.steps} steps after"
        f" {options.warm_up_steps}, by the device's clock.",
        "",
        "| training | target tokens/s | share of the bf16 peak | ms a step | padding | peak memory (GiB) |",
        "|---|---|---|---|---|---|",
    ]
    kinds = []
    for name, rounds in rows.items():
        result = sorted(rounds, key=lambda one: one["target_tokens"] / one["seconds"])[len(rounds) // 2]
        rate = result["target_tokens"] / result["seconds"]
        lines.append(
            f"| {name} | {rate:,.0f} | {rate * flops / peak['bfloat16']:.0%}"
            f" | {1000 * result['seconds'] / options.steps:.1f} | {result['padding']:.1%}"
            f" | {result['memory'] / 2**30:.2f} |"
        )
        total = sum(result["kinds"].values())
        kinds.append(
            f"- {name}: " + ", ".join(f"{kind} {value / total:.0%}" for kind, value in result["kinds"].items())
        )
    return "\n".join([*lines, "", "Time by kind of kernel, profiled:", "", *kinds])
