"""The page and the report of `manyheads demo`."""

import time
from pathlib import Path
from threading import Thread

import torch

from manyheads.commands.shared import say
from manyheads.data.translation import PhrasebookData
from manyheads.errors import UserError
from manyheads.lab.figures.runs import draw_pair
from manyheads.loading import load_torch_run
from manyheads.run import save_scores
from manyheads.tasks.translation import evaluate_translation

SAMPLES = 5
WORDS_IN_PLOT = 14


def show(folder: Path, device: torch.device, command: str) -> None:
    """Scores, five translations of test sentences, a plot of the best head, next commands."""
    loaded = load_torch_run(folder, device)
    assert isinstance(loaded.run.data, PhrasebookData)  # the recipe's
    evaluation = evaluate_translation(loaded.translator(), loaded.run.data, "test")
    scores, corpus = evaluation.scores, evaluation.corpus
    save_scores(folder, scores)
    print(f"test BLEU           {scores['bleu']:.1f}   {scores['signature']['bleu']}")
    print(f"compositional BLEU  {scores['compositional_bleu']:.1f}   (unseen word combinations)")
    print(f"exact matches       {100 * scores['exact_match']:.1f} %")
    print(f"alignment error     {100 * scores['alignment_error']:.1f} %   (best head)\n")
    rows = zip(corpus.sources, corpus.targets, evaluation.translations, strict=True)
    for source, reference, translation in list(rows)[:SAMPLES]:
        print(f"  {source}\n    {translation}")
        if translation != reference:
            print(f"    (reference: {reference})")
    plot = folder / "attention.png"
    try:
        pairs, error = corpus.aligned, evaluation.alignment
        assert pairs is not None
        assert error is not None
        pair = next(pair for pair in pairs if len(pair.target_words) <= WORDS_IN_PLOT)
        layer, head = error.best_head
        draw_pair(loaded, pair, plot, layer + 1, head + 1)
        print(f"\nCross-attention of its best head: {plot}\n")
    except UserError as error:  # no matplotlib: the rest is shown all the same
        print(f"\n{error}\n")
    print("Next:")
    print(f"  {command} view {folder}")
    print(f"  echo 'The small dog sees the tree.' | {command} translate {folder}")
    print(f"  {command} evaluate {folder} --split compositional")
    print(f"  {command} tokenize {folder} vierunddreißig")
    print(f"  {command} info {folder}")
    print(f"  {command} train phrasebook data.pair=en-fr --out runs/french")
    print(f"  {command} recipes")


def watch(folder: Path) -> Thread:
    """Serve the Watch page of a run from when it begins, and open it in a browser."""
    import webbrowser

    from manyheads.web.app import serve

    def ready(address: str) -> None:
        say(f"{address}watch")
        webbrowser.open(f"{address}watch")

    def run() -> None:
        while not (folder / "run.toml").is_file():
            time.sleep(0.2)
        serve(folder, "127.0.0.1", 0, None, ready)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread
