"""What `manyheads demo` shows once its model is trained."""

from itertools import combinations
from pathlib import Path

import torch

from manyheads.data.translation import PhrasebookData
from manyheads.errors import UserError
from manyheads.evaluate.alignment import word_maps
from manyheads.loading import TorchRun, load_torch_run
from manyheads.models.seq2seq import Seq2Seq
from manyheads.phrasebook import Pair
from manyheads.run import save_scores
from manyheads.tasks.translation import Evaluation, evaluate_translation
from manyheads.view.figures import heat_map

SAMPLES = 5
WORDS_IN_PICTURE = 14


def show(folder: Path, device: torch.device, command: str) -> None:
    """Scores, five translations of unseen sentences, a picture of the best head, what next."""
    opened = load_torch_run(folder, device)
    assert isinstance(opened.run.data, PhrasebookData)  # it was trained on them
    evaluation = evaluate_translation(opened.translator(), opened.run.data, "test")
    scores, corpus = evaluation.scores, evaluation.corpus
    save_scores(folder, scores)
    print(f"test BLEU           {scores['bleu']:.1f}   {scores['signature']['bleu']}")
    print(f"compositional BLEU  {scores['compositional_bleu']:.1f}   (unseen word combinations)")
    print(f"exact matches       {100 * scores['exact_match']:.1f} %")
    print(f"alignment error     {100 * scores['alignment_error']:.1f} %   (best head)\n")
    for source, wanted, written in list(
        zip(corpus.sources, corpus.targets, evaluation.translations, strict=True)
    )[:SAMPLES]:
        print(f"  {source}\n    {written}")
        if written != wanted:
            print(f"    (the phrasebook has: {wanted})")
    picture = folder / "attention.png"
    try:
        draw_alignment(opened, evaluation, picture)
        print(f"\nWhat its best head looks at: {picture}\n")
    except UserError as error:  # no matplotlib: the rest is worth having all the same
        print(f"\n{error}\n")
    print("Next:")
    print(f"  echo 'The small dog sees the tree.' | {command} translate {folder}")
    print(f"  {command} evaluate {folder} --split compositional")
    print(f"  {command} tokens {folder} vierunddreißig")
    print(f"  {command} info {folder}")
    print(f"  {command} train phrasebook data.pair=en-fr --out runs/french")


def crossings(pair: Pair) -> int:
    """How often two links cross: how much the order of the words differs."""
    links = sorted(pair.alignment)
    return sum(a < c and b > d for (a, b), (c, d) in combinations(links, 2))


def draw_alignment(opened: TorchRun, evaluation: Evaluation, picture: Path) -> None:
    """Cross-attention of the best head on a test sentence, gold links framed."""
    pairs, error = evaluation.corpus.aligned, evaluation.alignment
    assert pairs is not None
    assert error is not None
    short = [pair for pair in pairs if len(pair.target_words) <= WORDS_IN_PICTURE]
    pair = max(short[:100], key=crossings)
    layer, head = error.best_head
    assert isinstance(opened.model, Seq2Seq)
    _, weights = next(word_maps(opened.model, opened.tokenizer, [pair]))
    heat_map(
        weights[layer, head],
        [pair.target[a:b] for a, b in pair.target_words],
        [pair.source[a:b] for a, b in pair.source_words],
        f"cross-attention, layer {layer + 1}, head {head + 1} (frames: gold alignment)",
        picture,
        marks=[(target, source) for source, target in pair.alignment],
    )
