"""Training steps of ours beside `transformers` compiled: the same sizes, the same tokens, in turns.

    python benchmarks/training.py gpt bert translation --device cuda
    python benchmarks/training.py sizes --device cuda        # tokens/s and memory from 1M to 1.3B
    python benchmarks/training.py gpt --tiny                 # a look at the program itself

Ours is the training loop as `manyheads train` runs it (recorded passes, compiled blocks, batches
made ahead); theirs a plain loop with the model compiled, bfloat16 by autocast, fused AdamW and
clipping. A figure is the median over rounds that take turns in one process. One JSON object a line.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.data.batching import Batches, Ragged
from manyheads.data.hidden import MaskedBatch
from manyheads.data.translation import Batch
from manyheads.presets import preset
from manyheads.tasks.language import LanguageBatch, language_loss
from manyheads.tasks.masked import masked_pass
from manyheads.tasks.translation import MULTIPLE, translation_loss
from manyheads.train.loop import Trainer
from manyheads.train.objective import Loss
from manyheads.train.optimizer import Train

SEED = 1
STEPS = 10  # a round
SENTENCES = 20_000
Step = Callable[[int], object]


@dataclass
class Fixed:
    """A task whose batches were drawn before: what the loop asks of any task."""

    drawn: list[Any]
    loss: Callable[[nn.Module, Any], dict[str, Loss]]
    of: Callable[[Any], tuple[int, dict[str, int]]]
    device: torch.device
    digest = "drawn"
    per_epoch = 1
    notes: tuple[str, ...] = ()

    def batches(self, step: int) -> list[Any]:
        return [self.drawn[step % len(self.drawn)].to(self.device)]

    def tokens(self, batch: Any) -> int:
        return self.of(batch)[0]

    def counts(self, batch: Any) -> dict[str, int]:
        return self.of(batch)[1]

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Loss]:
        return self.loss(model, batch)

    def describe(self, step: int) -> str:
        return str(step)

    def validate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": 0.0}


@dataclass(frozen=True)
class Stream(LanguageBatch):
    """One that can be moved."""

    def to(self, device: torch.device) -> "Stream":
        moved = (x.to(device, non_blocking=True) for x in (self.tokens, self.wanted))
        return Stream(*moved, self.count)


@dataclass(frozen=True)
class Case:
    """One comparison: our settings and task, their model and what it is fed."""

    name: str
    config: Any
    task: Callable[[torch.device], Fixed]
    theirs: Callable[[], nn.Module] | None
    feed: Callable[[int, torch.device], tuple[dict[str, Tensor], int]] | None
    length: int = 0


def ours(case: Case, device: torch.device) -> tuple[Step, Fixed, nn.Module]:
    torch.manual_seed(SEED)
    model, task = case.config.build().to(device), case.task(device)
    train = Train(steps=10**6, schedule="constant", learning_rate=1e-4, compile="yes")
    folder = Path(tempfile.mkdtemp())
    trainer = Trainer(model, task, train, dim=case.config.dim, seed=SEED, folder=folder)
    trainer.compile_blocks()
    return trainer.step, task, model


def theirs(case: Case, device: torch.device) -> Step:
    assert case.theirs is not None
    assert case.feed is not None
    feed = case.feed
    torch.manual_seed(SEED)
    model = case.theirs().to(device).train()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(number: int) -> None:
        inputs, _ = feed(number, device)
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
            loss = compiled(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Step, first: int, count: int, device: torch.device) -> float:
    """Seconds for so many steps."""
    synchronize(device)
    begun = time.perf_counter()
    for number in range(first, first + count):
        step(number)
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(case: Case, device: torch.device, rounds: int, warm: int) -> dict[str, Any]:
    """Both in turns; the tokens are the real ones, padding apart."""
    begun = time.perf_counter()
    our_step, task, model = ours(case, device)
    first = timed(our_step, 0, 1, device)
    timed(our_step, 1, warm, device)
    found: dict[str, Any] = {"case": case.name, "ready_seconds": time.perf_counter() - begun}
    found |= {"first_step_seconds": first, "parameters": sum(p.numel() for p in model.parameters())}
    compiled = torch._dynamo.utils.counters["frames"]["ok"]
    sides: dict[str, Step] = {"ours": our_step}
    if case.theirs is not None:
        begun = time.perf_counter()
        sides["theirs"] = theirs(case, device)
        timed(sides["theirs"], 0, warm + 1, device)
        found["their_ready_seconds"] = time.perf_counter() - begun
        compiled = torch._dynamo.utils.counters["frames"]["ok"]
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        at = warm + 1 + turn * STEPS
        order = list(sides.items())[:: 1 if turn % 2 else -1]
        for name, step in order:
            if name == "ours":
                tokens = sum(task.tokens(b) for n in range(STEPS) for b in task.batches(at + n))
            else:
                assert case.feed is not None
                tokens = sum(case.feed(at + n, device)[1] for n in range(STEPS))
            rates[name].append(tokens / timed(step, at, STEPS, device))
    found |= {f"{name}_tokens_per_second": statistics.median(each) for name, each in rates.items()}
    found["compiled_later"] = torch._dynamo.utils.counters["frames"]["ok"] - compiled
    if "theirs" in rates:
        pairs = zip(rates["ours"], rates["theirs"], strict=True)
        found["ratio"] = statistics.median(a / b for a, b in pairs)
    if case.length:
        config = case.config
        a_token = 6 * found["parameters"] + 12 * config.layers * config.dim * case.length
        found["teraflops"] = a_token * found["ours_tokens_per_second"] / 1e12
    return found


def memory(case: Case, device: torch.device, warm: int) -> float:
    """GiB at the peak of ours alone."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step, _, _ = ours(case, device)
    timed(step, 0, warm, device)
    return torch.cuda.max_memory_allocated() / 2**30


def gpt(name: str, rows: int, length: int, tiny: bool, peer: bool = True) -> Case:
    config = replace(preset(name), max_length=length, dropout=0.0)
    if tiny:
        config = replace(config, layers=1, dim=32, heads=2, head_dim=None, vocab_size=500)
    random = np.random.default_rng(SEED)
    drawn = []
    for _ in range(8):
        whole = torch.from_numpy(random.integers(0, config.vocabulary, (rows, length + 1)))
        drawn.append(Stream(whole[:, :-1], whole[:, 1:], rows * length))

    def their_model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": config.dim, "n_layer": config.layers, "n_head": config.heads}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        named = GPT2Config(
            vocab_size=config.vocabulary, n_positions=length, use_cache=False, **sizes, **dropout
        )
        return GPT2LMHeadModel(named)

    def feed(step: int, device: torch.device) -> tuple[dict[str, Tensor], int]:
        tokens = drawn[step % len(drawn)].tokens.to(device, non_blocking=True)
        return {"input_ids": tokens, "labels": tokens}, tokens.numel()

    def task(device: torch.device) -> Fixed:
        return Fixed(
            drawn,
            lambda model, batch: {"tokens": language_loss(model, batch)},  # type: ignore[arg-type]
            lambda batch: (batch.tokens.numel(), {"tokens": batch.count}),
            device,
        )

    full = f"{name}, {rows} × {length}"
    return Case(full, config, task, their_model if peer else None, feed, length)


def bert(rows: int, length: int, tiny: bool) -> Case:
    config = replace(preset("bert-base"), dropout=0.1, attention_dropout=0.0)
    if tiny:
        config = replace(config, layers=1, dim=32, heads=2, vocab_size=500)
    random = np.random.default_rng(SEED)
    drawn = []
    for _ in range(8):
        tokens = torch.from_numpy(random.integers(5, config.vocabulary, (rows, length)))
        places = np.sort(random.permutation(rows * length)[: int(0.15 * rows * length)])
        wanted = torch.from_numpy(random.integers(5, config.vocabulary, len(places)))
        segments = (torch.arange(length) >= length // 2).long().expand(rows, -1).contiguous()
        other = torch.from_numpy(random.integers(0, 2, rows))
        at = torch.from_numpy(places)
        batch = MaskedBatch(tokens, None, segments, at, wanted, other, rows * length)
        drawn.append(batch.padded(64))

    def their_model() -> nn.Module:
        from transformers import BertConfig, BertForPreTraining

        return BertForPreTraining(
            BertConfig(
                vocab_size=config.vocabulary,
                hidden_size=config.dim,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=4 * config.dim,
                attention_probs_dropout_prob=0.0,
            )
        )

    labels = []
    for batch in drawn:
        flat = torch.full((rows * length,), -100)
        flat[batch.places[: batch.predictions]] = batch.wanted[: batch.predictions]
        labels.append(flat.view(rows, length))

    def feed(step: int, device: torch.device) -> tuple[dict[str, Tensor], int]:
        batch, label = drawn[step % len(drawn)], labels[step % len(drawn)]
        given = {"input_ids": batch.tokens, "token_type_ids": batch.segments, "labels": label}
        given["next_sentence_label"] = batch.other
        return {k: v.to(device, non_blocking=True) for k, v in given.items()}, rows * length

    def task(device: torch.device) -> Fixed:
        counts = {"next_sentence": rows}
        return Fixed(
            drawn,
            lambda model, batch: masked_pass(model, batch).losses,  # type: ignore[arg-type]
            lambda batch: (batch.size, {"masked": batch.predictions, **counts}),
            device,
        )

    return Case(f"bert-base, {rows} × {length}", config, task, their_model, feed)


def sentences(vocabulary: int) -> tuple[Ragged, Ragged]:
    """Sources and targets of drawn lengths: about 25 tokens, as newspapers have them, to 100."""
    random = np.random.default_rng(SEED)
    source = np.clip(random.lognormal(np.log(22), 0.5, SENTENCES), 3, 100).astype(int)
    target = np.clip(source * random.normal(1.05, 0.15, SENTENCES), 3, 100).astype(int)
    sides = [
        [random.integers(5, vocabulary, n).tolist() for n in side] for side in (source, target)
    ]
    return Ragged.of(sides[0]), Ragged.of(sides[1])


def translation(batch_tokens: int, tiny: bool, unsorted: bool) -> Case:
    """`unsorted`: theirs takes sentences as they come; ours always sorts them into buckets."""
    config = preset("transformer-base")
    if tiny:
        config = replace(config, layers=1, dim=32, heads=2, vocab_size=500)
    sources, targets = sentences(config.vocabulary)
    order = Batches(np.maximum(sources.lengths, targets.lengths), batch_tokens, SEED)
    steps = range(min(200, order.per_epoch))
    plain = [Batch.of(sources, targets, order.rows(step), 1, 0) for step in steps]
    drawn = [one.padded(order.most(step), MULTIPLE) for step, one in zip(steps, plain, strict=True)]
    if unsorted:
        rows = np.random.default_rng(SEED).permutation(len(sources.lengths))
        size = max(1, batch_tokens // int(np.maximum(sources.lengths, targets.lengths).max()))
        parts = [rows[n : n + size] for n in range(0, len(rows) - size, size)]
        plain = [Batch.of(sources, targets, part, 1, 0) for part in parts[: len(steps)]]

    def their_model() -> nn.Module:
        from transformers import MarianConfig, MarianMTModel

        sides = {}
        for side in ("encoder", "decoder"):
            sides |= {f"{side}_layers": config.layers, f"{side}_attention_heads": config.heads}
            sides[f"{side}_ffn_dim"] = 4 * config.dim
        settings = MarianConfig(
            vocab_size=config.vocabulary, d_model=config.dim, pad_token_id=0, eos_token_id=2,
            decoder_start_token_id=1, scale_embedding=True, use_cache=False, dropout=0.1, **sides,
        )  # fmt: skip
        return MarianMTModel(settings)

    def feed(step: int, device: torch.device) -> tuple[dict[str, Tensor], int]:
        one = plain[step % len(plain)].to(device)
        given = {"input_ids": one.source, "attention_mask": one.source_real.long()}
        given |= {"decoder_input_ids": one.target}
        given |= {"labels": one.wanted.masked_fill(~one.real, -100)}
        return given, one.source_tokens + one.target_tokens

    def task(device: torch.device) -> Fixed:
        return Fixed(
            drawn,
            lambda model, batch: {"tokens": translation_loss(model, batch, 0.1)},  # type: ignore[arg-type]
            lambda batch: (
                batch.source_tokens + batch.target_tokens,
                {"tokens": batch.target_tokens},
            ),
            device,
        )

    name = f"transformer-base, {batch_tokens} tokens, theirs {'unsorted' if unsorted else 'sorted'}"
    return Case(name, config, task, their_model, feed)


def cases(kind: str, tiny: bool) -> list[Case]:
    rows = 2 if tiny else 32
    if kind == "gpt":
        length = 16 if tiny else 1024
        medium = gpt("gpt3-medium", rows // 2, length, tiny)
        return [gpt("gpt3-small", rows, length, tiny), medium]
    if kind == "bert":
        return [
            bert(8 * rows, 16 if tiny else 128, tiny),
            bert(2 * rows, 32 if tiny else 512, tiny),
        ]
    if kind == "translation":
        budget = 400 if tiny else 32_768
        return [translation(budget, tiny, unsorted) for unsorted in (False, True)]
    names = ("gpt3-small",) if tiny else ("gpt3-small", "gpt3-medium", "gpt3-large", "gpt3-xl")
    return [gpt(name, rows // 2, 16 if tiny else 1024, tiny, peer=False) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kinds", nargs="+", choices=["gpt", "bert", "translation", "sizes"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=20, help="steps before anything is timed")
    parser.add_argument("--only", type=int, help="the number of one case alone, from 0")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.set_num_threads(2)
    for kind in given.kinds:
        for number, case in enumerate(cases(kind, given.tiny)):
            if given.only in (None, number):
                row = compare(case, device, given.rounds, given.warm)
                torch._dynamo.reset()
                if device.type == "cuda":
                    row["peak_gib"] = memory(case, device, given.warm)
                    torch._dynamo.reset()
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
