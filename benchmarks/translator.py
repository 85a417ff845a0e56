"""Training and beam search of a small translator against `transformers`' Marian and others.

All are the same model with the same weights (x-transformers, where it is installed: one of the
same sizes), run on the same sentences in one process, in turns; a figure is the median ratio of
paired rounds. Decoding is also that of CTranslate2 in float32, and ours in eight bits.

    make bench        (or: python benchmarks/translator.py --rounds 7 --json)
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from manyheads.data.batching import Batches
from manyheads.data.translation import Batch, EncodedPairs, PhrasebookData
from manyheads.decode.beam import Decode
from manyheads.decode.translate import AnyTranslator, Translator
from manyheads.evaluate.scores import translation_scores
from manyheads.exchange.ctranslate2 import write_ctranslate2
from manyheads.exchange.ctranslate2_runtime import Ctranslate2Model, Ctranslate2Translator
from manyheads.exchange.huggingface import to_huggingface
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.embedding import Embed
from manyheads.nn.int8 import in_int8
from manyheads.nn.positions import Sinusoidal
from manyheads.nn.residual import Norm
from manyheads.tasks.translation import translation_loss
from manyheads.tokens import Tokenizer
from manyheads.train.loop import seed_step
from manyheads.train.optimizer import Train, build_optimizer, learning_rate
from manyheads.vocabularies import Bpe

OURS = "ours"
BEAM = 5
BATCH = 32
LONGEST = 64
STEPS = 6  # updates a round


def config(vocab_size: int, layers: int = 3, dim: int = 256) -> Seq2SeqConfig:
    """What Marian is in our terms: post-norm, sinusoids in halves, scaled tied embeddings."""
    return Seq2SeqConfig(
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        heads=dim // 64,
        hidden=4 * dim,
        max_length=256,
        position=Sinusoidal(layout="halves"),
        norm=Norm(placement="post"),
        embed=Embed(scale="sqrt-dim"),
        dropout=0.1,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--steps", type=int, default=2500, help="updates before decoding")
    options.add_argument("--kept", type=Path, default=Path("runs/benchmark.safetensors"))
    options.add_argument("--sentences", type=int, default=128)
    options.add_argument("--vocabulary", type=int, default=4000)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(1)

    data = PhrasebookData(train_pairs=40_000)
    corpus, test = data.read("train"), data.read("test")
    tokenizer = Bpe(vocab_size=given.vocabulary).train([*corpus.sources, *corpus.targets])
    # The output layer has the asked size even where the corpus yields fewer tokens.
    ours = config(max(given.vocabulary, tokenizer.vocab_size)).build()
    pairs = EncodedPairs(corpus, tokenizer, ours.config.max_length)
    order = Batches(pairs.lengths, 2048, seed=1)
    warm_up(ours, pairs, order, given.steps, given.kept)
    ours.tokenizer = tokenizer
    theirs = to_huggingface(ours)
    check_equal(ours, theirs, pairs.batch(order.rows(0)), tokenizer.pad)
    result = {
        "parameters": sum(p.numel() for p in ours.parameters()),
        "vocabulary": ours.config.vocab_size,
        "threads": given.threads,
        "training": training(ours, theirs, pairs, order, given.rounds),
    }
    # Training moved both models apart: decode with equal weights again.
    ours.tokenizer = tokenizer
    theirs = to_huggingface(ours)
    sentences = test.sources[: given.sentences]
    wanted = test.targets[: given.sentences]
    result["decoding"] = decoding(ours, theirs, tokenizer, sentences, wanted, given.rounds)
    print(json.dumps(result, indent=2) if given.json else report(result))


def warm_up(
    model: torch.nn.Module, pairs: EncodedPairs, order: Batches, steps: int, kept: Path
) -> None:
    """Train until sentences end where they should, so that decoding does honest work.

    That takes most of an hour on two cores, so the weights are kept for the next time.
    """
    if kept.exists():
        model.load_state_dict({k: v.float() for k, v in load_file(kept).items()})
        return
    train = Train(steps=steps, warmup_steps=400, schedule="linear", learning_rate=1e-3)
    optimizer = build_optimizer(model, train)
    model.train()
    for step in range(steps):
        seed_step(1, step)
        loss = translation_loss(model, pairs.batch(order.rows(step)), 0.0)
        (loss.objective / loss.count).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, 256, step + 1)
        optimizer.step()
        optimizer.zero_grad()
    kept.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(model.state_dict()), kept)


def labels_of(batch: Batch) -> torch.Tensor:
    return batch.wanted.masked_fill(~batch.real, -100)


def check_equal(ours: torch.nn.Module, theirs: torch.nn.Module, batch: Batch, pad: int) -> None:
    """The two really are one model: equal logits at all real positions."""
    ours.eval(), theirs.eval()
    with torch.no_grad():
        a = ours(batch.source, batch.target, batch.source_real)[batch.real]
        b = theirs(
            input_ids=batch.source,
            attention_mask=batch.source_real.long(),
            decoder_input_ids=batch.target,
        ).logits[batch.real]
    difference = float((a - b).abs().max())
    assert difference < 1e-3, f"the two models differ by {difference}"


def training(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    pairs: EncodedPairs,
    order: Batches,
    rounds: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Updates on the same sentences, plain cross-entropy, fused AdamW on both sides.

    Once in identical batches, which shows the model alone, and once each in its own: ours from
    length buckets, theirs in any order.
    """
    optimizers = [build_optimizer(m, Train(learning_rate=1e-4)) for m in (ours, theirs)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-5
    ours.train(), theirs.train()

    def our_update(batch: Batch) -> None:
        loss = translation_loss(ours, batch, 0.0)
        (loss.objective / loss.count).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    def their_update(batch: Batch) -> None:
        theirs(
            input_ids=batch.source,
            attention_mask=batch.source_real.long(),
            decoder_input_ids=batch.target,
            labels=labels_of(batch),
        ).loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    def one_round(update: Callable[[Batch], None], batches: list[Batch]) -> float:
        began = time.perf_counter()
        for batch in batches:
            update(batch)
        return time.perf_counter() - began

    figures = {}
    for name in ("same batches", "own batches"):
        mine, other = [], []
        for number in range(rounds):
            steps = range(1000 + number * STEPS, 1000 + (number + 1) * STEPS)
            parts = [order.rows(step) for step in steps]
            mine.append([pairs.batch(rows) for rows in parts])
            if name == "own batches":
                # As transformers' Trainer does unless told otherwise: any order, padded.
                mixed = np.random.default_rng(number).permutation(np.concatenate(parts))
                parts = np.array_split(mixed, STEPS)
            other.append([pairs.batch(rows) for rows in parts])
        tokens = sum(b.source_tokens + b.target_tokens for part in mine for b in part) / rounds
        sides = {
            OURS: lambda number, mine=mine: one_round(our_update, mine[number]),
            "transformers": lambda number, other=other: one_round(their_update, other[number]),
        }
        if name == "same batches" and find_spec("x_transformers"):
            update = x_update(ours.config)
            sides["x-transformers"] = lambda number, mine=mine, update=update: one_round(
                update, mine[number]
            )
        for side in sides.values():
            side(0)
        figures[name] = compare(sides, rounds, tokens)
    return figures


def x_update(config: Seq2SeqConfig) -> Callable[[Batch], None]:
    """An update of x-transformers' encoder–decoder of the same sizes."""
    from x_transformers import XTransformer

    sizes = {"num_tokens": config.vocab_size, "depth": config.layers, "heads": config.heads}
    sizes |= {"max_seq_len": config.max_length, "attn_flash": True}
    named = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
    model = XTransformer(dim=config.dim, tie_token_emb=True, **named)
    optimizer = build_optimizer(model, Train(learning_rate=1e-4))

    def update(batch: Batch) -> None:
        # It shifts the target by itself, and ignores −100.
        target = torch.cat([batch.target[:, :1], labels_of(batch)], dim=1)
        model(batch.source, target, mask=batch.source_real).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def decoding(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    tokenizer: Tokenizer,
    sentences: list[str],
    wanted: list[str],
    rounds: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Beam search of the same sentences with the same weights, and how many come out equal.

    Once in identical batches of sentences of similar length, and once as a user has them: ours
    sorts by itself, theirs takes a batch as it comes.
    """
    ours.eval(), theirs.eval()
    folder = tempfile.mkdtemp()
    write_ctranslate2(ours, tokenizer, Path(folder), "float32")
    other = Ctranslate2Model(Path(folder), "Translator")
    encoded = tokenizer.encode_batch(sentences)
    sorted_rows = np.argsort([len(ids) for ids in encoded], kind="stable")
    as_they_come = np.arange(len(sentences))
    figures = {}
    for name, order in (("same batches", sorted_rows), ("own batches", as_they_come)):
        groups = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        whole = 100_000 if name == "same batches" else Decode().batch_tokens
        decode = Decode(
            beam=BEAM,
            length_penalty=1.0,
            longest_ratio=0.0,
            longest_extra=LONGEST,
            batch_tokens=whole,
        )
        parts = groups if name == "same batches" else [order]
        translators: dict[str, AnyTranslator] = {
            OURS: Translator(ours, tokenizer, decode),
            "ours in eight bits": Translator(in_int8(ours), tokenizer, decode),
            "ctranslate2": Ctranslate2Translator(other, tokenizer, decode),
        }
        written = {
            side: lambda parts=parts, one=one: translate(
                parts, lambda rows: one.translate([sentences[row] for row in rows])
            )
            for side, one in translators.items()
        }
        written["transformers"] = lambda groups=groups: translate(
            groups, lambda rows: generate(theirs, tokenizer, [encoded[row] for row in rows])
        )
        texts = {side: write() for side, write in written.items()}  # warms all up, too
        tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts["transformers"])
        sides = {side: lambda _, write=write: seconds(write) for side, write in written.items()}
        figures[name] = compare(sides, rounds, tokens)
        for side, own in texts.items():
            pairs = zip(texts[OURS], own, strict=True)
            figures[name][side]["equal"] = sum(a == b for a, b in pairs) / len(sentences)
            figures[name][side]["bleu"] = translation_scores(own, wanted)["bleu"]
    return figures


def translate(groups: Sequence[np.ndarray], write: Callable[[np.ndarray], list[str]]) -> list[str]:
    """Texts of all rows, a group at a time."""
    texts = {}
    for rows in groups:
        texts.update(zip(rows.tolist(), write(rows), strict=True))
    return [texts[row] for row in sorted(texts)]


def generate(theirs: torch.nn.Module, tokenizer: Tokenizer, sources: list[list[int]]) -> list[str]:
    """A padded batch through `transformers`' beam search."""
    rows = [[*ids, tokenizer.end] for ids in sources]
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad] * (width - len(row)) for row in rows])
    out = theirs.generate(
        input_ids=ids,
        attention_mask=(ids != tokenizer.pad).long(),
        num_beams=BEAM,
        max_length=LONGEST + 1,
        length_penalty=1.0,
        early_stopping=True,
    )
    return tokenizer.decode_batch(out.tolist())


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(
    sides: dict[str, Callable[[int], float]], rounds: int, tokens: float
) -> dict[str, dict[str, float]]:
    """Rounds in turns; a ratio is the median over rounds of a side's time by ours."""
    times = [{name: side(number) for name, side in sides.items()} for number in range(rounds)]
    return {
        name: {
            "tokens_per_second": tokens / statistics.median(one[name] for one in times),
            "ours_is_faster": statistics.median(one[name] / one[OURS] for one in times),
        }
        for name in sides
    }


def report(result: dict[str, object]) -> str:
    lines = [
        f"{result['parameters']:,} parameters, vocabulary {result['vocabulary']}, "
        f"{result['threads']} threads"
    ]
    for work in ("training", "decoding"):
        for name, sides in result[work].items():
            for side, row in sides.items():
                more = {key: row[key] for key in ("equal", "bleu") if key in row}
                told = "".join(f", {key} {value:.3f}" for key, value in more.items())
                lines.append(
                    f"{work}, {name}: {side} {row['tokens_per_second']:,.0f} tokens/s, "
                    f"ours is {row['ours_is_faster']:.2f} × as fast{told}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
