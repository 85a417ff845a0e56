"""Probes: how a model treats a few fixed validation examples while it is trained.

At about 40 steps, evenly spaced on a logarithmic scale, the trainer calls `record`. The Watch page
shows the result. An example is a sentence to translate, a text to continue or a picture.

    probes/sentences.json  the examples: subwords of source and target, gold alignment; subwords of
                           prompt and continuation, ids (kind = "language"); pixels (kind =
                           "images")
    probes/probes.jsonl    a line for each probe: step, alignment error of each head and, for each
                           example, the greedy output with log P per token, log P per token of the
                           reference, and attention as bytes, round(255 · weight), compressed by
                           zlib, in base64: cross-attention of the reference [layers, heads, target
                           tokens, source tokens], self-attention of the text [layers, heads,
                           tokens, tokens], or attention to the patches [layers, heads, rows,
                           columns], divided by `maxima` of each head. A picture has the
                           probabilities of the likeliest classes in place of an output.
    probes/weights/        with train.probe_weights the weights of each probe in half precision
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from manyheads.data.batching import Ragged, Rows
from manyheads.data.translation import Batch, Corpus
from manyheads.decode.beam import SpecialTokens
from manyheads.decode.decoder import GraphCache
from manyheads.decode.generate import Generator
from manyheads.decode.translate import Translator
from manyheads.errors import DataError
from manyheads.evaluate.alignment import alignment_error, teacher_forced
from manyheads.fileio import make_subfolder, write_text
from manyheads.models.capture import capture, has_cross_attention
from manyheads.models.gpt import Gpt
from manyheads.phrasebook import Pair
from manyheads.tokenizer.tokenizer import Tokenizer
from manyheads.train.checkpoint import write_tensors
from manyheads.train.metrics import step_of
from manyheads.train.optimizer import Train

FOLDER, SENTENCES, PROBES, WEIGHTS = "probes", "sentences.json", "probes.jsonl", "weights"
MAX_SENTENCES = 8
MAX_TOKENS = 18  # longest source or target: a line of text has to fit the page
MAX_MAP_BYTES = 20_000  # attention of all examples in one probe
MAX_PROMPTS = 4
MAX_WINDOW = 28  # tokens of a prompt and its continuation
MAX_CLASSES = 10  # the likeliest ones of a picture
MAX_PICTURE_SIDE = 96  # pixels of a stored picture

Record = dict[str, Any]


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random states of NumPy and PyTorch at the end."""
    numpy = np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    np.random.set_state(numpy)


def probe_steps(steps: int, count: int) -> set[int]:
    """0, the last step, and steps evenly spaced on a logarithmic scale between them."""
    return {0, *np.geomspace(1, steps, max(1, count - 1)).round().astype(int).tolist()}


class Probe:
    """Records fixed examples at some steps of a training, into the folder of the run.

    `examples` are as the page shows them. `measure` gives the record of a model: for each example
    its output and attention, in `sentences`.
    """

    def __init__(
        self, task: Any, folder: Path, examples: list[Record], measure: Callable[[Any], Record]
    ) -> None:
        train: Train = task.train.settled(task.per_epoch)
        self.folder, self.examples, self.measure = folder / FOLDER, examples, measure
        self.steps, self.keeps_weights = probe_steps(train.steps, train.probes), train.probe_weights

    def resume(self, step: int) -> None:
        """Write the examples, and drop the probes after this step, as those of metrics.jsonl."""
        make_subfolder(self.folder)
        write_text(self.folder / SENTENCES, json.dumps(self.examples) + "\n")
        path = self.folder / PROBES
        lines = path.read_bytes().splitlines() if path.exists() and step else []
        past = [line.decode() for line in lines if 0 <= step_of(line) <= step]
        write_text(path, "".join(f"{line}\n" for line in past))

    @torch.no_grad()
    def record(self, model: Any, step: int) -> None:
        """Append a line for this step, and save the weights if requested.

        Random numbers that a probe draws do not change those of the training.
        """
        model.eval()
        with random_state_kept(next(model.parameters()).device):
            line = {"step": step, **self.measure(model)}
        path = self.folder / PROBES
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise DataError(
                f"{path} could not be saved ({error}): free disk space and try again"
            ) from None
        if self.keeps_weights:
            make_subfolder(self.folder / WEIGHTS)
            state = {name: tensor.half() for name, tensor in model.state_dict().items()}
            write_tensors(self.folder / WEIGHTS / f"{step}.safetensors", state, {"step": step})


# --- Translation: cross-attention ---


def translation_probe(task: Any, model: Any, folder: Path) -> Probe | None:
    """Translate validation sentences; None if there is nothing to show."""
    corpus, tokenizer = task.valid_corpus, task.tokenizer
    rows = choose_sentences(model, corpus, tokenizer) if has_cross_attention(model) else []
    if not rows:
        return None
    # Before it has learned to stop, a model would write to the limit.
    decode = replace(task.run.decode, beam=1, max_length_ratio=1.0, max_length_extra=6)
    translator = Translator(model, tokenizer, decode, GraphCache())
    special = translator.special_tokens
    texts = [corpus.sources[row] for row in rows]
    sources = [special.source(ids) for ids in tokenizer.encode_batch(texts)]
    references = tokenizer.target.encode_batch([corpus.targets[row] for row in rows])
    pairs = [corpus.aligned[row] for row in rows] if corpus.aligned else []
    examples = []
    for number, row in enumerate(rows):
        pair = pairs[number] if pairs else None
        examples.append(
            {
                "source": corpus.sources[row],
                "target": corpus.targets[row],
                "source_tokens": tokenizer.subwords(sources[number]),
                "target_tokens": tokenizer.target.subwords([*references[number], special.end]),
                "alignment": sorted(pair.alignment) if pair else None,
                "source_words": pair.source_words if pair else None,
                "target_words": pair.target_words if pair else None,
            }
        )

    def measure(model: Any) -> Record:
        hypotheses = replace(translator, model=model).search(texts, n_best=1)
        outputs = [best[0].tokens if best else [] for best in hypotheses]
        maps, log_probs = score(model, special, 2 * sources, [*references, *outputs])
        sentences = [
            {
                "text": tokenizer.decode(output),
                "tokens": tokenizer.target.subwords([*output, special.end]),
                "log_probs": log_probs[len(rows) + number],
                "reference_log_probs": log_probs[number],
                **pack(maps[:, number, :, : len(reference) + 1, : len(source)]),
            }
            for number, (source, reference, output) in enumerate(
                zip(sources, references, outputs, strict=True)
            )
        ]
        if not pairs:
            return {"sentences": sentences}
        rates = alignment_error(model, tokenizer, pairs).rates
        return {"sentences": sentences, "alignment_error": rates}

    return Probe(task, folder, examples, measure)


def choose_sentences(model: Any, corpus: Corpus, tokenizer: Tokenizer) -> list[int]:
    """Rows of a corpus; those whose words change their order most come first."""
    sources = tokenizer.encode_batch(corpus.sources)
    targets = tokenizer.target.encode_batch(corpus.targets)
    lengths = [max(map(len, ids)) for ids in zip(sources, targets, strict=True)]
    rows = [row for row, length in enumerate(lengths) if 5 <= length <= MAX_TOKENS]
    if corpus.aligned:
        aligned = corpus.aligned
        rows.sort(key=lambda row: -crossings(aligned[row]))
    maps = model.config.layers * getattr(model.config, "heads", 1) * MAX_TOKENS**2
    return rows[: max(1, min(MAX_SENTENCES, MAX_MAP_BYTES // maps))]


def crossings(pair: Pair) -> int:
    """Pairs of alignment links that cross: how much the word order changes."""
    links = sorted(pair.alignment)
    return sum(a[0] < b[0] and a[1] > b[1] for a in links for b in links)


# --- Language models: self-attention ---


def language_probe(task: Any, model: Any, folder: Path) -> Probe | None:
    """Continue prompts of the validation text: the first half of windows of equal length.

    None if the maps of the model are too large, or not of all tokens.
    """
    if not isinstance(model, Gpt) or not model.config.attention.exact:
        return None
    tokenizer = task.tokenizer
    windows = choose_windows(model, task.valid.flat, tokenizer)
    if not windows:
        return None
    generator = Generator(model, tokenizer, replace(task.run.decode, beam=1))
    length, half = len(windows[0]), len(windows[0]) // 2
    prompts = [window[:half] for window in windows]
    examples = [
        {
            "kind": "language",
            "source": tokenizer.decode(window[:half]),
            "target": tokenizer.decode(window[half:]),
            "source_tokens": tokenizer.subwords(window[:half]),
            "target_tokens": tokenizer.subwords(window[half:]),
            "ids": window,
        }
        for window in windows
    ]

    def measure(model: Any) -> Record:
        outputs = continue_prompts(replace(generator, model=model), prompts, length)
        written = [[*prompt, *ids] for prompt, ids in zip(prompts, outputs, strict=True)]
        maps, log_probs = score_texts(model, [*windows, *written])
        sentences = [
            {
                "text": tokenizer.decode(output),
                "tokens": tokenizer.subwords(output),
                "log_probs": log_probs[len(windows) + number][half - 1 :],
                "reference_log_probs": log_probs[number],
                **pack(maps[:, number, :, :length, :length]),
            }
            for number, output in enumerate(outputs)
        ]
        return {"sentences": sentences}

    return Probe(task, folder, examples, measure)


def choose_windows(model: Gpt, text: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Windows evenly spaced in a text, each from the beginning of a word."""
    maps = model.config.layers * model.config.heads
    # A causal map is half zeros, which take no space.
    length = min(MAX_WINDOW, model.config.max_length, isqrt(2 * MAX_MAP_BYTES // maps))
    if length < 6:
        return []
    count = min(MAX_PROMPTS, 2 * MAX_MAP_BYTES // (maps * length**2))
    windows: list[list[int]] = []
    for part in range(count):
        begin = part * len(text) // count
        near = tokenizer.subwords(text[begin : begin + length].tolist())
        first = [
            bool(token.strip()) and (token[0].isspace() or not last.strip())
            for last, token in pairwise(near)
        ]
        begin += 1 + first.index(True) if any(first) else 0
        windows.append(text[begin : begin + length].tolist())
    return [window for window in windows if len(window) == length]


def continue_prompts(
    generator: Generator, prompts: Sequence[Sequence[int]], length: int
) -> list[list[int]]:
    """The greedy continuations of prompts, to texts of at most `length` tokens."""
    hypotheses = generator.search(prompts, length - len(prompts[0]), n_best=1)
    return [best[0].tokens if best else [] for best in hypotheses]


# --- Image classifiers: attention to the patches ---


def image_probe(task: Any, model: Any, folder: Path) -> Probe | None:
    """Classify validation pictures, one of each class first.

    The attention of a head is that of the class token to the patches; without a class token, the
    mean over all patches. None if the maps of one picture are too large.
    """
    config = model.config
    count = min(MAX_SENTENCES, MAX_MAP_BYTES // (config.layers * config.heads * config.side**2))
    if not config.attention.exact or not count:
        return None
    _, first = np.unique(task.valid_labels, return_index=True)
    rest = np.setdiff1d(np.arange(len(task.valid_labels)), first)
    rows = [*first.tolist(), *rest.tolist()][:count]
    names = config.head.labels
    classes = task.valid_labels[rows].tolist()
    pixels, images = task.valid[rows], task.normalized(rows)
    every = -(-pixels.shape[-1] // MAX_PICTURE_SIDE)
    stored = rearrange(pixels[..., ::every, ::every], "n c height width -> n height width c")
    examples = [
        {
            "kind": "images",
            "label": names[label],
            "size": list(picture.shape),
            "pixels": packed(picture),
        }
        for label, picture in zip(classes, stored, strict=True)
    ]

    def measure(model: Any) -> Record:
        with capture(model) as maps:
            logits = model(images.to(next(model.parameters())))
        log_probs = logits.float().log_softmax(-1).cpu()
        weights = torch.stack(maps["self"]).float()  # [layers, b, h, t, s]
        looks = weights[..., 0, 1:] if config.first == "token" else weights.mean(-2)
        looks = rearrange(looks, "l b h (row column) -> b l h row column", row=config.side)
        maxima = looks.amax((-2, -1))
        sentences = []
        for number, label in enumerate(classes):
            likeliest = log_probs[number].topk(min(MAX_CLASSES, len(names)))
            shares = zip(likeliest.indices.tolist(), likeliest.values.exp().tolist(), strict=True)
            sentences.append(
                {
                    "probabilities": [[names[index], round(share, 4)] for index, share in shares],
                    "reference_log_probs": [round(float(log_probs[number, label]), 4)],
                    "maxima": [[round(x, 5) for x in row] for row in maxima[number].tolist()],
                    **pack(looks[number] / maxima[number, ..., None, None]),
                }
            )
        return {"sentences": sentences}

    return Probe(task, folder, examples, measure)


# --- Scores and attention as JSON ---


def packed(data: Any) -> str:
    """The bytes of an array, compressed by zlib, in base64."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(data).tobytes())).decode()


def pack(weights: Tensor) -> dict[str, Any]:
    """Shape and bytes of attention weights."""
    data = (255 * weights).round().to(torch.uint8).cpu().numpy()
    return {"shape": list(data.shape), "attention": packed(data)}


def score(
    model: Any, special: SpecialTokens, sources: list[list[int]], targets: Sequence[list[int]]
) -> tuple[Tensor, list[list[float]]]:
    """Cross-attention [layers, b, h, t, s], and log P of every target token and of the end."""
    labels = Ragged.of([[*ids, special.end] for ids in targets])
    rows = np.arange(len(sources))
    batch = Batch.of(Ragged.of(sources), labels, rows, special.start, special.padding)
    maps, log_probs = teacher_forced(model, batch.to(next(model.parameters()).device))
    return torch.stack(maps["cross"]).float(), _rounded(log_probs, labels.lengths)


def score_texts(model: Any, texts: list[list[int]]) -> tuple[Tensor, list[list[float]]]:
    """Self-attention [layers, b, h, t, t] of texts, and log P of every token but the first."""
    rows = Ragged.of(texts)
    tokens = rows.padded(np.arange(len(texts)), 0)[0].to(next(model.parameters()).device)
    with capture(model) as maps:
        logits = model(tokens)
    log_probs = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.stack(maps["self"]).float(), _rounded(log_probs, rows.lengths - 1)


def _rounded(log_probs: Tensor, lengths: Rows) -> list[list[float]]:
    """The values of each row without padding."""
    rows = zip(log_probs.tolist(), lengths.tolist(), strict=True)
    return [[round(value, 4) for value in values[:length]] for values, length in rows]
