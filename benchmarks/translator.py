"""Training and beam search of a small translator against `transformers`' Marian and others.

All are the same model with the same weights (x-transformers, where it is installed: one of the
same sizes), run on the same sentences in one process, in turns; a figure is the median over the
rounds, a ratio that of paired rounds. Training is also ours in bfloat16; decoding that of
CTranslate2 in float32 and int8, with what these cost in BLEU. Measured
once in identical batches, which compares the models, and once in each library's own batches, which
is what a user has. One JSON object a line.

    make bench        (or: python benchmarks/translator.py --rounds 7)
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from manyheads.data.batching import Batches
from manyheads.data.translation import Batch, EncodedPairs, PhrasebookData
from manyheads.decode.beam import Decode
from manyheads.decode.translate import BaseTranslator, Translator
from manyheads.evaluate.scores import translation_scores
from manyheads.exchange.ctranslate2 import (
    Ctranslate2Model,
    Ctranslate2Translator,
    write_ctranslate2,
)
from manyheads.exchange.huggingface import to_huggingface
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.nn.layers import EmbeddingConfig, Norm
from manyheads.nn.positions import Sinusoidal
from manyheads.tasks.translation import translation_loss
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.tokenizer.train import Bpe
from manyheads.train.loop import seed_step
from manyheads.train.optimizer import Train, build_optimizer, learning_rate
from speed import Row, Rows, compared, in_turns, options, reported

OURS, THEIRS = "ours", "transformers"
HALF = "ours in bfloat16"
SAME, SEPARATE = "same batches", "own batches"
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
        ffn_dim=4 * dim,
        max_length=256,
        position=Sinusoidal(layout="halves"),
        norm=Norm(placement="post"),
        embed=EmbeddingConfig(scale="sqrt-dim"),
        dropout=0.1,
    )


@dataclass(frozen=True)
class Work:
    """A trained model, what it was trained on, and what it has never seen."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    pairs: EncodedPairs
    order: Batches
    sources: list[str]
    targets: list[str]
    rounds: int
    timed: int  # how many sentences are decoded in a round


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options(parser)
    parser.set_defaults(rounds=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2500, help="updates before decoding")
    parser.add_argument("--kept", type=Path, default=Path("runs/benchmark.safetensors"))
    parser.add_argument("--sentences", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=4000)
    inputs = parser.parse_args()
    torch.set_num_threads(inputs.threads)
    rows = Rows(
        "translator", inputs, {"device": f"CPU, {inputs.threads} threads", "dtype": "float32"}
    )
    work = None if inputs.names else prepared(inputs)
    for name, measure in (("training", training), ("decoding", decoding)):
        for batches in (SEPARATE, SAME):
            rows.add(f"{name}, {batches}", lambda how=(measure, batches): how[0](work, how[1]))


def prepared(inputs: argparse.Namespace) -> Work:
    torch.manual_seed(1)
    data = PhrasebookData(train_pairs=500 if inputs.tiny else 40_000)
    corpus, test = data.read("train"), data.read("test")
    vocabulary = 400 if inputs.tiny else inputs.vocabulary
    tokenizer = Bpe(vocab_size=vocabulary).train([*corpus.sources, *corpus.targets])
    # The output layer has the asked size even where the corpus yields fewer tokens.
    sizes = (1, 64) if inputs.tiny else (3, 256)
    model = config(max(vocabulary, tokenizer.vocab_size), *sizes).build()
    pairs = EncodedPairs(corpus, tokenizer, model.config.max_length)
    order = Batches(pairs.lengths, 2048, seed=1)
    if inputs.tiny:
        warm_up(model, pairs, order, 3, None)
    else:
        warm_up(model, pairs, order, inputs.steps, inputs.kept)
    model.tokenizer = tokenizer
    check_equal(model, to_huggingface(model), pairs.batch(order.rows(0)))
    count = 8 if inputs.tiny else len(test.sources)
    sides = test.sources[:count], test.targets[:count]
    return Work(model, tokenizer, pairs, order, *sides, inputs.rounds, min(inputs.sentences, count))


def warm_up(
    model: torch.nn.Module, pairs: EncodedPairs, order: Batches, steps: int, saved: Path | None
) -> None:
    """Train until sentences end where they should, so that decoding does honest work.

    That takes most of an hour of one core, so the weights are kept for the next time.
    """
    about = {"steps": str(steps), "vocabulary": str(model.config.vocab_size)}
    if saved is not None and saved.exists():
        with safe_open(saved, "pt") as file:
            metadata = file.metadata() or {}
        if metadata != about:
            sys.exit(f"{saved} holds other weights ({metadata}, not {about}): give another --kept")
        model.load_state_dict({k: v.float() for k, v in load_file(saved).items()})
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
    if saved is None:
        return
    saved.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(model.state_dict()), saved, about)


def labels_of(batch: Batch) -> torch.Tensor:
    return batch.labels.masked_fill(~batch.loss_mask, -100)


def check_equal(ours: torch.nn.Module, theirs: torch.nn.Module, batch: Batch) -> None:
    """The two really are one model: equal logits at all real positions."""
    ours.eval(), theirs.eval()
    with torch.no_grad():
        a = ours(batch.source, batch.target, batch.source_real)[batch.loss_mask]
        b = theirs(
            input_ids=batch.source,
            attention_mask=batch.source_real.long(),
            decoder_input_ids=batch.target,
        ).logits[batch.loss_mask]
    difference = float((a - b).abs().max())
    assert difference < 1e-3, f"the two models differ by {difference}"


def training(work: Work, batches: str) -> Row:
    """Updates on the same sentences, plain cross-entropy, fused AdamW on all sides.

    In batches of their own ours come from length buckets, those of the others in any order.
    """
    ours, half = (copy.deepcopy(work.model).train() for _ in range(2))
    theirs = to_huggingface(work.model).train()
    errors: dict[str, str] = {}

    def our_loss(batch: Batch) -> torch.Tensor:
        loss = translation_loss(ours, batch, 0.0)
        return loss.objective / loss.count

    def half_loss(batch: Batch) -> torch.Tensor:
        """As with train.precision=bfloat16."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = translation_loss(half, batch, 0.0)
        return loss.objective / loss.count

    def their_loss(batch: Batch) -> torch.Tensor:
        return theirs(
            input_ids=batch.source,
            attention_mask=batch.source_real.long(),
            decoder_input_ids=batch.target,
            labels=labels_of(batch),
        ).loss

    updates = {OURS: update_of(ours, our_loss), THEIRS: update_of(theirs, their_loss)}
    updates[HALF] = update_of(half, half_loss)
    if not find_spec("x_transformers"):
        print("without x-transformers: pip install x-transformers", file=sys.stderr)
    else:
        try:
            updates["x-transformers"] = x_update(ours.config)
        except Exception as error:  # the others are still compared
            errors["x-transformers"] = reported(error)
    mine, others, tokens = drawn(work, batches)
    drawn_for = {name: mine if name in (OURS, HALF) else others for name in updates}

    def rate(name: str, number: int) -> float:
        began = time.perf_counter()
        for batch in drawn_for[name][number]:
            updates[name](batch)
        return tokens[number] / (time.perf_counter() - began)

    sides = {name: lambda number, name=name: rate(name, number) for name in updates}
    in_turns(sides, 1, errors)  # warms all up
    row = compared(in_turns(sides, work.rounds, errors), [OURS, HALF])
    parameters = sum(p.numel() for p in ours.parameters())
    return row | {"parameters": parameters, "errors": errors}


def update_of(
    model: torch.nn.Module, loss: Callable[[Batch], torch.Tensor]
) -> Callable[[Batch], None]:
    optimizer = build_optimizer(model, Train(learning_rate=1e-4))
    for group in optimizer.param_groups:
        group["lr"] = 1e-5

    def update(batch: Batch) -> None:
        loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def drawn(work: Work, batches: str) -> tuple[list[list[Batch]], list[list[Batch]], list[int]]:
    """The batches of each round: ours, those of the others, and how many tokens are in them."""
    mine, others = [], []
    for number in range(work.rounds):
        steps = range(1000 + number * STEPS, 1000 + (number + 1) * STEPS)
        parts = [work.order.rows(step) for step in steps]
        mine.append([work.pairs.batch(rows) for rows in parts])
        if batches == SEPARATE:
            # The default of transformers' Trainer: random order, padded.
            mixed = np.random.default_rng(number).permutation(np.concatenate(parts))
            parts = np.array_split(mixed, STEPS)
        others.append([work.pairs.batch(rows) for rows in parts])
    tokens = [sum(b.source_tokens + b.target_tokens for b in part) for part in mine]
    return mine, others, tokens


def x_update(config: Seq2SeqConfig) -> Callable[[Batch], None]:
    """An update of x-transformers' encoder–decoder of the same sizes."""
    from x_transformers import XTransformer

    sizes = {"num_tokens": config.vocab_size, "depth": config.layers, "heads": config.heads}
    sizes |= {"max_seq_len": config.max_length, "attn_flash": True}
    named = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in sizes.items()}
    model = XTransformer(dim=config.dim, tie_token_emb=True, **named)

    def loss(batch: Batch) -> torch.Tensor:
        # The model shifts the target internally and ignores −100.
        target = torch.cat([batch.target[:, :1], labels_of(batch)], dim=1)
        return model(batch.source, target, mask=batch.source_real)

    return update_of(model, loss)


def decoding(work: Work, batches: str) -> Row:
    """Beam search of the same sentences with the same weights, and how many come out equal.

    With own batches ours sorts sentences and theirs does not; otherwise both get batches of
    sentences of similar length.
    """
    ours, tokenizer = work.model.eval(), work.tokenizer
    theirs = to_huggingface(ours).eval()
    sentences, errors = work.sources[: work.timed], {}
    encoded = tokenizer.encode_batch(sentences)
    lengths = [len(ids) for ids in encoded]
    order = np.argsort(lengths, kind="stable") if batches == SAME else np.arange(len(sentences))
    groups = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    decode = how_to_decode(100_000 if batches == SAME else Decode().batch_tokens)
    parts = groups if batches == SAME else [order]
    translators: dict[str, BaseTranslator] = {OURS: Translator(ours, tokenizer, decode)}
    for kind in ("float32", "int8"):
        try:
            folder = Path(tempfile.mkdtemp())
            write_ctranslate2(ours, tokenizer, folder, kind)
            other = Ctranslate2Model(folder, "Translator")
            name = "ctranslate2" if kind == "float32" else "ctranslate2 int8"
            translators[name] = Ctranslate2Translator(
                other, tokenizer, decode, ours, kind == "float32"
            )
        except Exception as error:  # the others are still compared
            errors[f"ctranslate2 {kind}"] = reported(error)
    written = {
        side: lambda item=item: translate(
            parts, lambda rows: item.translate([sentences[row] for row in rows])
        )
        for side, item in translators.items()
    }
    written[THEIRS] = lambda: translate(
        groups, lambda rows: generate(theirs, tokenizer, [encoded[row] for row in rows])
    )
    texts = {side: write() for side, write in written.items()}  # warms all up, too
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts[THEIRS])
    sides = {
        side: lambda _, write=write: tokens / seconds(write) for side, write in written.items()
    }
    row = compared(in_turns(sides, work.rounds, errors), [OURS])
    expected = work.targets[: work.timed]
    for side, figures in row["sides"].items():
        pairs = zip(texts[OURS], texts[side], strict=True)
        figures["equal"] = sum(a == b for a, b in pairs) / len(sentences)
        figures["bleu"] = translation_scores(texts[side], expected)["bleu"]
    return row | {"sentences": len(sentences), "errors": errors}


def how_to_decode(batch_tokens: int | None) -> Decode:
    return Decode(
        beam=BEAM,
        length_penalty=1.0,
        max_length_ratio=0.0,
        max_length_extra=LONGEST,
        batch_tokens=batch_tokens,
    )


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


if __name__ == "__main__":
    main()
