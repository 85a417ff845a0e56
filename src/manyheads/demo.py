"""What `manyheads demo` shows once its model is trained."""

from pathlib import Path

import torch

from manyheads.evaluate.alignment import word_maps
from manyheads.run import open_run, save_scores
from manyheads.tasks.translation import evaluate_run
from manyheads.view.figures import heat_map

SAMPLES = 5


def show(folder: Path, device: torch.device) -> None:
    """Scores, five translations of unseen sentences, a picture of the best head, what next."""
    opened = open_run(folder, device)
    translator = opened.translator()
    scores = evaluate_run(translator, opened.run.data, "test")
    save_scores(folder, scores)
    print(f"test BLEU           {scores['bleu']:.1f}   {scores['signature']['bleu']}")
    print(f"compositional BLEU  {scores['compositional_bleu']:.1f}   (unseen word combinations)")
    print(f"exact matches       {100 * scores['exact_match']:.1f} %")
    error = 100 * scores["alignment_error"]
    print(f"alignment error     {error:.1f} %   ({scores['alignment_best_head']})\n")
    corpus = opened.run.data.read("test")
    for source, wanted, written in zip(
        corpus.sources[:SAMPLES],
        corpus.targets,
        translator.translate(corpus.sources[:SAMPLES]),
        strict=False,
    ):
        print(
            f"  {source}\n    {written}" + ("" if written == wanted else f"\n    (gold: {wanted})")
        )
    picture = folder / "attention.png"
    draw_alignment(folder, picture, device, str(scores["alignment_best_head"]))
    print(f"\nWhat its heads look at: {picture}")
    print("Next:")
    print(f"  echo 'The small dog sees the tree.' | manyheads translate {folder}")
    print(f"  manyheads evaluate {folder} --split compositional")
    print(f"  manyheads tokens {folder} vierunddreißig")
    print(f"  manyheads info {folder}")
    print("  manyheads train phrasebook data.pair=en-fr --out runs/french")


def draw_alignment(folder: Path, picture: Path, device: torch.device, head_name: str) -> None:
    """Cross-attention of one head on a test sentence, gold links framed."""
    opened = open_run(folder, device)
    pairs = opened.run.data.read("test").aligned
    if pairs is None:
        return
    pair = max(pairs[:40], key=lambda p: (len(p.target_words) <= 14, len(p.target_words)))
    layer, head = (int(word.strip(",")) - 1 for word in head_name.split()[1::2])
    _, weights = next(iter(word_maps(opened.model, opened.tokenizer, [pair])))
    heat_map(
        weights[layer, head],
        [pair.target[a:b] for a, b in pair.target_words],
        [pair.source[a:b] for a, b in pair.source_words],
        f"cross-attention, {head_name} (frames: gold alignment)",
        picture,
        marks=[(target, source) for source, target in pair.alignment],
    )
