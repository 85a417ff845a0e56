"""Seconds of training until a quality is reached: ours and a usual program, in turns.

    python benchmarks/time_to_quality.py language --data input.txt --device cuda
    python benchmarks/time_to_quality.py translation --data multi30k --device cuda
    python benchmarks/time_to_quality.py language --data input.txt --tiny     # the program itself

`language` trains nanoGPT's model of characters by its protocol, written from its description
(github.com/karpathy/nanoGPT, train_shakespeare_char: 6 layers of 384, learned positions, no
biases, dropout 0.2, AdamW, 5,000 steps of 64 × 256). Its best validation loss is the goal for
ours. `translation` trains a model of `transformers` with the sizes, tokens, batches and schedule
of ours; the goal is a validation BLEU of --goal, greedy. Further settings of ours are given as
`a.b=c`. DATA is a text file, or a folder with train.en, train.de, val.en and val.de.

Each side starts in a process of its own and validates after the same steps on the same text. One
JSON object a line, of each side and seed:

    seconds            from the start of training, with compilation, but without validations
    total_seconds      with validations and the preparation of the data
    step, value        the validation that reached the goal, or the best one if `reached` is false
    curve              [step, seconds, value] of every validation

The last line is the ratio of ours to the other side, the median over seeds.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Row = dict[str, Any]
HELD_OUT = 0.1  # share of the characters; they end the text
SIDES = {"language": ("nanogpt", "ours"), "translation": ("transformers", "ours")}


class Clock:
    """Seconds of training; validations are timed apart. Keeps the curve and knows the goal."""

    def __init__(self, goal: float, *, rising: bool) -> None:
        self.goal, self.sign = goal, 1 if rising else -1
        self.start = time.perf_counter()
        self.validating = 0.0
        self.curve: list[tuple[int, float, float]] = []

    def reached(self, value: float) -> bool:
        return self.sign * value >= self.sign * self.goal

    def add(self, step: int, value: float, began: float) -> bool:
        """Note a validation that began at that time; true if the goal is reached."""
        self.validating += time.perf_counter() - began
        self.curve.append((step, self.seconds(), value))
        return self.reached(value)

    def seconds(self) -> float:
        return time.perf_counter() - self.start - self.validating

    def row(self) -> Row:
        hits = [point for point in self.curve if self.reached(point[2])]
        step, seconds, value = (
            hits[0] if hits else max(self.curve, key=lambda point: self.sign * point[2])
        )
        return {
            "reached": bool(hits) and math.isfinite(self.goal),
            "step": step,
            "seconds": round(seconds, 2),
            "value": round(value, 4),
            "total_seconds": round(time.perf_counter() - self.start, 2),
            "curve": [(step, round(at, 2), round(value, 4)) for step, at, value in self.curve],
        }


class Reached(Exception):
    """Ends a training of ours from its callback."""


# --- nanoGPT --------------------------------------------------------------------------------------


class NanoBlock(nn.Module):
    """x + Attention(LN(x)), then x + MLP(LN(x)); no biases."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in range(2))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(self.output(attended.transpose(1, 2).reshape(b, t, d)), p)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), p)


class NanoGpt(nn.Module):
    """Tied embeddings, learned positions; N(0, 0.02), output projections divided by √(2L)."""

    def __init__(self, vocabulary: int, length: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.dropout = 0.2
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(NanoBlock(dim, heads, self.dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = (
                    math.sqrt(2 * layers) if name.endswith(("output.weight", "down.weight")) else 1
                )
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        x = F.dropout(x, self.dropout if self.training else 0.0)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def cosine(step: int, steps: int, peak: float, last: float, warmup: int) -> float:
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return last + 0.5 * (peak - last) * (1 + math.cos(math.pi * done))


def split_text(path: Path) -> tuple[str, str]:
    """The text to train on, and its last tenth to validate on."""
    text = path.read_text(encoding="utf-8")
    cut = round(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def train_nanogpt(arguments: argparse.Namespace, clock: Clock) -> None:
    train, valid = split_text(arguments.data)
    letters = {letter: number for number, letter in enumerate(sorted(set(train + valid)))}
    device = torch.device(arguments.device)
    ids, held_out = (
        torch.tensor([letters[letter] for letter in text], device=device) for text in (train, valid)
    )
    length, rows, dim, layers = (32, 4, 32, 2) if arguments.tiny else (256, 64, 384, 6)
    steps, every = (20, 10) if arguments.tiny else (5000, arguments.every or 250)
    model = NanoGpt(len(letters), length, dim, layers, heads=max(1, dim // 64)).to(device)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=device.type == "cuda")
    fast: Callable[..., Tensor] = model if arguments.tiny else torch.compile(model)
    window = torch.arange(length + 1, device=device)
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - length, (rows, 1), device=device)
        batch = ids[starts + window]
        for group in optimizer.param_groups:
            group["lr"] = cosine(step, steps, 1e-3, 1e-4, 100)
        with torch.autocast(device.type, torch.bfloat16):
            loss = fast(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % every == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            clock.add(step, nano_loss(model, held_out, length), began)


@torch.no_grad()
def nano_loss(model: NanoGpt, text: Tensor, length: int) -> float:
    """The mean of −log P of all characters, in windows that do not overlap."""
    model.eval()
    count = (len(text) - 1) // length * length
    inputs, labels = (text[at : at + count].view(-1, length) for at in (0, 1))
    total = 0.0
    for some, expected in zip(inputs.split(64), labels.split(64), strict=True):
        with torch.autocast(text.device.type, torch.bfloat16):
            total += float(model(some, expected)) * expected.numel()
    model.train()
    return total / count


# --- a loop around transformers -------------------------------------------------------------------


def train_transformers(arguments: argparse.Namespace, clock: Clock) -> None:
    """MarianMTModel with the tokens, batches, sizes and schedule of ours; BLEU of greedy search."""
    from sacrebleu.metrics import BLEU
    from transformers import MarianConfig, MarianMTModel

    from manyheads.recipes import read_recipe
    from manyheads.run import make_trainer

    device = torch.device(arguments.device)
    recipe = read_recipe("translation", settings_of(arguments))
    task: Any = make_trainer(recipe, Path(arguments.out) / "data", device).task
    run, tokenizer = task.run, task.tokenizer
    config = run.model
    clock.start = time.perf_counter()  # the data are ready: an advantage over ours
    sizes: Row = {}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": config.layers, f"{side}_attention_heads": config.heads}
        sizes[f"{side}_ffn_dim"] = config.ffn_dim
    settings = MarianConfig(
        vocab_size=tokenizer.vocab_size, d_model=config.dim, dropout=config.dropout,
        pad_token_id=tokenizer.pad, eos_token_id=tokenizer.end, forced_eos_token_id=None,
        decoder_start_token_id=tokenizer.start, scale_embedding=True, **sizes,
    )  # fmt: skip
    model = MarianMTModel(settings).to(device)
    model.generation_config.bad_words_ids = None
    fast = model if arguments.tiny else torch.compile(model, dynamic=True)
    peak, warmup = run.train.learning_rate, run.train.warmup_steps
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
    )
    for step in range(1, run.train.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step, run.train.steps, peak, 0.1 * peak, warmup)
        for batch in task.batches(step):
            with torch.autocast(device.type, torch.bfloat16):
                logits = fast(
                    input_ids=batch.source,
                    attention_mask=batch.source_real.long(),
                    decoder_input_ids=batch.target,
                ).logits
            labels = batch.labels.masked_fill(~batch.loss_mask, -100)
            F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1
            ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % run.train.validate_every == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            corpus = task.valid_corpus
            texts = list(greedy(model, tokenizer, corpus.sources, device))
            if clock.add(step, BLEU().corpus_score(texts, [corpus.targets]).score, began):
                return


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, sources: list[str], device: torch.device) -> Iterator[str]:
    """Translations by `generate` with beam 1, 256 sentences at once."""
    model.eval()
    for begin in range(0, len(sources), 256):
        ids = [[*tokenizer.encode(text), tokenizer.end] for text in sources[begin : begin + 256]]
        rows = [torch.tensor(row, device=device) for row in ids]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad)
        mask = (padded != tokenizer.pad).long()
        with torch.autocast(device.type, torch.bfloat16):
            output = model.generate(padded, attention_mask=mask, num_beams=1, max_new_tokens=80)
        for row in output[:, 1:].tolist():
            end = row.index(tokenizer.end) if tokenizer.end in row else len(row)
            yield tokenizer.decode(row[:end])
    model.train()


# --- ours -----------------------------------------------------------------------------------------


def settings_of(arguments: argparse.Namespace) -> list[str]:
    """The settings of our recipe, those of the command line last."""
    settings = [f"seed={arguments.seed}"]
    if arguments.what == "language":
        settings += [f"data.folder={arguments.folder}", "tokens=characters"]
    else:
        settings += [f"data.folder={arguments.data}", "data.source=en", "data.target=de"]
        settings += ["decode.bleu_sentences=100000", "decode.beam=1"]
    if arguments.every:
        settings += [f"train.validate_every={arguments.every}"]
    if arguments.tiny:
        settings += ["model.dim=32", "model.layers=1", "model.heads=1", "model.ffn_dim=64"]
        settings += ["train.steps=20", "train.warmup_steps=5", "train.validate_every=10"]
        settings += ["train.batch_tokens=512", "decode.bleu_sentences=8"]
    return settings + arguments.settings


def train_ours(arguments: argparse.Namespace, clock: Clock) -> None:
    from manyheads import train

    name = "loss" if arguments.what == "language" else "bleu"
    last = time.perf_counter()

    def listen(step: int, split: str, scores: dict[str, float]) -> None:
        nonlocal last
        if split != "valid":
            last = time.perf_counter()  # the line of the training loss is written just before
        elif clock.add(step, scores[name], last):
            raise Reached

    if arguments.what == "language":
        arguments.folder = Path(arguments.out) / "text"
        arguments.folder.mkdir()
        for split, text in zip(("train", "valid"), split_text(arguments.data), strict=True):
            (arguments.folder / f"{split}.txt").write_text(text, encoding="utf-8")
    recipe = arguments.what
    clock.start = time.perf_counter()
    with suppress(Reached):
        train(recipe, settings_of(arguments), Path(arguments.out) / "run", arguments.device, listen)


TRAIN = {"nanogpt": train_nanogpt, "transformers": train_transformers, "ours": train_ours}


def measure(arguments: argparse.Namespace) -> None:
    """One side and seed, in this process."""
    torch.manual_seed(arguments.seed)
    with tempfile.TemporaryDirectory() as arguments.out:
        clock = Clock(arguments.goal, rising=arguments.what == "translation")
        TRAIN[arguments.side](arguments, clock)
        row = {
            "side": arguments.side,
            "seed": arguments.seed,
            "goal": arguments.goal,
            **clock.row(),
        }
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=SIDES)
    parser.add_argument("settings", nargs="*", help="settings of ours, a.b=c")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--goal", type=float, help="default: BLEU 40; the best loss of nanoGPT")
    parser.add_argument("--every", type=int, help="steps between validations")
    parser.add_argument("--tiny", action="store_true", help="the program itself")
    parser.add_argument("--side", choices=TRAIN, help="only this side, in this process")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.side:
        measure(arguments)
        return
    theirs, ours = SIDES[arguments.what]
    ratios = []
    for seed in arguments.seeds:
        goal = arguments.goal
        if goal is None:
            goal = 40.0 if arguments.what == "translation" else -math.inf
        other = one_side(theirs, seed, goal)
        goal = other["value"] if goal == -math.inf else goal
        row = one_side(ours, seed, goal)
        if row["reached"] and (other["reached"] or goal == other["value"]):
            ratios.append(row["seconds"] / other["seconds"])
    result = {"reached": f"{len(ratios)} of {len(arguments.seeds)} seeds", "ratios": ratios}
    print(json.dumps(result | {"median": statistics.median(ratios) if ratios else None}))


def one_side(side: str, seed: int, goal: float) -> Row:
    """Start this program for one side; pass on its row."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    command += ["--seed", str(seed), f"--goal={goal}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = done.stdout.strip().splitlines()[-1]
    print(line, flush=True)
    return json.loads(line)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
