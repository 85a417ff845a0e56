"""Probes: how a translation model treats a few fixed sentences while it is trained.

At about 40 steps, evenly spaced on a logarithmic scale, the trainer calls `record`. The Watch page
shows the result.

    probes/sentences.json  the sentences: subwords of source and target, gold alignment
    probes/probes.jsonl    a line for each probe: step, alignment error of each head and, for each
                           sentence, the greedy translation with log P per token, log P per token
                           of the reference, and the cross-attention of the reference as bytes,
                           round(255 · weight), [layers, heads, target tokens, source tokens],
                           compressed by zlib, in base64
    probes/weights/        with train.probe_weights the weights of each probe in half precision
"""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyheads.data.translation import Corpus
from manyheads.decode.decoder import GraphCache
from manyheads.decode.translate import Translator
from manyheads.errors import DataError
from manyheads.evaluate.alignment import alignment_error
from manyheads.fileio import write_text
from manyheads.models.capture import capture, has_cross_attention
from manyheads.phrasebook import Pair
from manyheads.train.checkpoint import write_tensors
from manyheads.train.metrics import step_of
from manyheads.train.optimizer import Train

FOLDER, SENTENCES, PROBES, WEIGHTS = "probes", "sentences.json", "probes.jsonl", "weights"
MAX_SENTENCES = 8
MAX_TOKENS = 18  # longest source or target: a line of text has to fit the page
MAX_MAP_BYTES = 20_000  # attention of all sentences in one probe


def probe_steps(steps: int, count: int) -> set[int]:
    """0, the last step, and steps evenly spaced on a logarithmic scale between them."""
    return {0, *np.geomspace(1, steps, max(1, count - 1)).round().astype(int).tolist()}


def crossings(pair: Pair) -> int:
    """Pairs of alignment links that cross: how much the word order changes."""
    links = sorted(pair.alignment)
    return sum(
        source < other_source and target > other_target
        for source, target in links
        for other_source, other_target in links
    )


class TranslationProbe:
    """Translates fixed validation sentences and records attention, into the folder of a run.

    Sentences whose words change their order most come first. `resume_step` is the step that
    training continues from: later lines are dropped, as those of metrics.jsonl.
    """

    def __init__(self, translator: Translator, corpus: Corpus, folder: Path, train: Train) -> None:
        self.translator, self.folder = translator, folder / FOLDER
        self.steps, self.keeps_weights = probe_steps(train.steps, train.probes), train.probe_weights
        rows = self._choose(corpus)
        self.sources = [corpus.sources[row] for row in rows]
        self.targets = [corpus.targets[row] for row in rows]
        self.pairs = [corpus.aligned[row] for row in rows] if corpus.aligned else []

    def _choose(self, corpus: Corpus) -> list[int]:
        encode = self.translator.tokenizer.encode_batch
        lengths = [
            max(map(len, ids))
            for ids in zip(encode(corpus.sources), encode(corpus.targets), strict=True)
        ]
        rows = [row for row, length in enumerate(lengths) if 5 <= length <= MAX_TOKENS]
        if corpus.aligned:
            aligned = corpus.aligned
            rows.sort(key=lambda row: -crossings(aligned[row]))
        model: Any = self.translator.model
        maps = model.config.layers * getattr(model.config, "heads", 1) * MAX_TOKENS**2
        return rows[: max(1, min(MAX_SENTENCES, MAX_MAP_BYTES // maps))]

    def resume(self, step: int) -> None:
        """Write the sentences, and drop the probes after this step."""
        self.folder.mkdir(exist_ok=True)
        write_text(self.folder / SENTENCES, json.dumps(self._sentences()) + "\n")
        path = self.folder / PROBES
        lines = path.read_bytes().splitlines() if path.exists() and step else []
        past = [line.decode() for line in lines if 0 <= step_of(line) <= step]
        write_text(path, "".join(f"{line}\n" for line in past))

    def _sentences(self) -> list[dict[str, Any]]:
        tokenizer, special = self.translator.tokenizer, self.translator.special_tokens
        sentences = []
        for number, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            pair = self.pairs[number] if self.pairs else None
            sentences.append(
                {
                    "source": source,
                    "target": target,
                    "source_tokens": tokenizer.subwords(special.source(tokenizer.encode(source))),
                    "target_tokens": tokenizer.subwords([*tokenizer.encode(target), special.end]),
                    "alignment": sorted(pair.alignment) if pair else None,
                    "source_words": pair.source_words if pair else None,
                    "target_words": pair.target_words if pair else None,
                }
            )
        return sentences

    @torch.no_grad()
    def record(self, model: Any, step: int) -> None:
        """Append a line for this step, and save the weights if requested."""
        model.eval()
        translator = replace(self.translator, model=model)
        tokenizer, special = translator.tokenizer, translator.special_tokens
        hypotheses = translator.search(self.sources, n_best=1)
        outputs = [best[0].tokens if best else [] for best in hypotheses]
        references = tokenizer.encode_batch(self.targets)
        sources = [special.source(ids) for ids in tokenizer.encode_batch(self.sources)]
        maps, log_probs = score(model, special, 2 * sources, [*references, *outputs])
        count = len(sources)
        line: dict[str, Any] = {"step": step, "sentences": []}
        for number, (source, reference, output) in enumerate(
            zip(sources, references, outputs, strict=True)
        ):
            weights_of = maps[:, number, :, : len(reference) + 1, : len(source)]
            data = (255 * weights_of).round().to(torch.uint8).cpu().numpy()
            line["sentences"].append(
                {
                    "text": tokenizer.decode(output),
                    "tokens": tokenizer.subwords([*output, special.end]),
                    "log_probs": log_probs[count + number],
                    "reference_log_probs": log_probs[number],
                    "shape": list(data.shape),
                    "attention": base64.b64encode(zlib.compress(data.tobytes())).decode(),
                }
            )
        if self.pairs:
            line["alignment_error"] = alignment_error(model, tokenizer, self.pairs).rates
        path = self.folder / PROBES
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise DataError(
                f"{path} could not be saved ({error}): free disk space and try again"
            ) from None
        if self.keeps_weights:
            (self.folder / WEIGHTS).mkdir(exist_ok=True)
            state = {name: tensor.half() for name, tensor in model.state_dict().items()}
            write_tensors(self.folder / WEIGHTS / f"{step}.safetensors", state, {"step": step})


def score(
    model: nn.Module, special: Any, sources: Sequence[list[int]], targets: Sequence[list[int]]
) -> tuple[Tensor, list[list[float]]]:
    """Cross-attention [layers, b, h, t, s], and log P of every target token and of the end."""
    device = next(model.parameters()).device

    def pad(rows: Sequence[list[int]]) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)

    source = pad(sources)
    lengths = torch.tensor([len(row) for row in sources], device=device)
    padding_mask = torch.arange(source.shape[1], device=device) < lengths[:, None]
    with capture(model) as maps:
        logits = model(source, pad([[special.start, *ids] for ids in targets]), padding_mask)
    labels = pad([[*ids, special.end] for ids in targets])
    log_probs = logits.float().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    rounded = [
        [round(value, 4) for value in row[: len(ids) + 1]]
        for row, ids in zip(log_probs.tolist(), targets, strict=True)
    ]
    return torch.stack(maps["cross"]).float(), rounded


def translation_probe(task: Any, model: Any, folder: Path) -> TranslationProbe | None:
    """The probe of a translation task; None if there is nothing to show, or the run is short."""
    train = task.train.settled(task.per_epoch)
    if not has_cross_attention(model) or train.steps < train.probes:
        return None
    # Before it has learned to stop, a model would write to the limit.
    decode = replace(task.run.decode, beam=1, max_length_ratio=1.0, max_length_extra=6)
    translator = Translator(model, task.tokenizer, decode, GraphCache())
    probe = TranslationProbe(translator, task.valid_corpus, folder, train)
    return probe if probe.sources else None
