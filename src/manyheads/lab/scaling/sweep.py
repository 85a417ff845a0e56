"""A sweep in its folder: planned, trained run by run, fitted, predicted, checked.

OUT/plan.json is what was planned, OUT/results.json what has been trained, OUT/prediction.json what
was predicted and measured; each run has an ordinary run folder in OUT. OUT/text is the built-in
text, where the recipe names no other.
"""

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyheads.config import dump, to_toml
from manyheads.data.language import TextData, Texts
from manyheads.errors import DataError, UserError
from manyheads.fileio import drop_partials, write_text
from manyheads.lab.compare import validation_curve
from manyheads.lab.scaling.law import Band, Fit, Price, fit
from manyheads.lab.scaling.plan import (
    Plan,
    Planned,
    Sweep,
    check_recipe,
    make_plan,
    sizes_of,
    steps_within,
)
from manyheads.lab.scaling.prediction import Prediction, Trained, begun, measure, predict, read
from manyheads.phrasebook import sentences
from manyheads.run import SETTINGS, TOKENIZER, Run, differences, locked, make_folder, model_digest
from manyheads.tasks.language import LanguageTask
from manyheads.train.loop import Trainer
from manyheads.train.metrics import Bar

PLAN, RESULTS, TEXT = "plan.json", "results.json", "text"
# Of the built-in text: for each split as many seeds, with each as many sentences.
SENTENCES = {"train": (6, 50_000), "valid": (1, 2_000)}
WARM, TIMED = 2, 4  # steps before and while time is taken


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a sweep has found: runs, laws, the price of a token, and the prediction.

    `by_size` is the law of N at the most tokens and `by_data` that of D in the largest model,
    where there are enough of them. `longer` is what the runs would predict but for the shortest: a
    number far from the prediction says that these follow another law.
    """

    trained: tuple[Trained, ...]
    joint: Fit
    by_size: Fit | None
    by_data: Fit | None
    price: Price
    prediction: Prediction
    longer: Band | None


class Scaling:
    """A sweep of a recipe in a folder: text, tokenizer and task, which all its runs share."""

    def __init__(self, run: Run, sweep: Sweep, out: Path, device: torch.device) -> None:
        check_recipe(run)
        self.out, self.sweep, self.device = out, sweep, device
        if out.is_file():
            raise UserError(f"{out} is a file: choose another folder with --out")
        run = with_text(run, out)
        assert isinstance(run.data, TextData)
        assert run.tokens is not None  # a recipe has them
        part, valid = run.data.read("train"), run.data.read("valid")
        self.tokenizer = run.tokens.train(part.strings())
        model = dataclasses.replace(run.model, vocab_size=self.tokenizer.vocab_size)
        self.task = self._task(dataclasses.replace(run, model=model), part, valid)
        train = run.train.settled(self.task.per_epoch)
        self.run = dataclasses.replace(run, model=model, train=train)
        self.step_tokens = sum(map(self.task.tokens, self.task.batches(0)))
        self.plan = self._planned()

    def _task(self, run: Run, part: Texts, valid: Texts) -> LanguageTask:
        return LanguageTask(run, part, valid, self.tokenizer, self.device)

    @property
    def epochs(self) -> float:
        """How often the predicted run sees each token."""
        return self.plan.target.run.train.steps / self.task.per_epoch

    def _planned(self) -> Plan:
        """The plan that the folder has, or a new one where none of its runs has begun."""
        asked = {
            "recipe": dump(self.run),
            "sizes": self.sweep.sizes,
            "data": self.sweep.data,
            "budget": self.sweep.budget or 0.0,
            "text": self.task.digest,
        }
        kept = _read_json(self.out / PLAN)
        found = ["it has no plan"] if kept is None else differences(asked, kept["asked"])
        if not found and kept is not None:
            return self._plan(kept["steps"], kept["seconds_per_step"])
        if self.results() or begun(self.out) or list(self.out.glob(f"*/{SETTINGS}")):
            raise UserError(f"{self.out} holds another sweep ({found[0]}): choose another --out")
        seconds = self._seconds()
        steps = self.run.train.steps
        if self.sweep.budget is not None:
            steps = steps_within(
                self.run,
                self.sweep,
                step_tokens=self.step_tokens,
                seconds=seconds,
                valid_tokens=len(self.task.valid.flat),
            )
        plan = self._plan(steps, seconds)
        about = {"asked": asked, "steps": steps, "seconds_per_step": seconds}
        make_folder(self.out)
        write_text(self.out / PLAN, json.dumps(about, indent=2) + "\n")
        return plan

    def _plan(self, steps: int, seconds: dict[str, float]) -> Plan:
        return make_plan(
            self.run,
            self.sweep,
            steps=steps,
            step_tokens=self.step_tokens,
            seconds=seconds,
            valid_tokens=len(self.task.valid.flat),
        )

    def _seconds(self) -> dict[str, float]:
        """How long a step of each size takes, measured on a few."""
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            for run in sizes_of(self.run, self.sweep):
                trainer = self._trainer(run, Path(folder))
                for step in range(WARM + TIMED):
                    if step == WARM:
                        began = self._now()
                    trainer.step(step)
                found[f"{run.model.dim}x{run.model.layers}"] = (self._now() - began) / TIMED
                trainer.close()
        return found

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _trainer(self, run: Run, folder: Path) -> Trainer:
        torch.manual_seed(run.seed)
        model = run.model.build().to(self.device)
        return Trainer(
            model,
            self.task,
            run.train.settled(self.task.per_epoch),
            dim=run.model.dim,
            seed=run.seed,
            folder=folder,
            metadata={"model": model_digest(run.model)},
        )

    def results(self) -> dict[str, float]:
        """The losses of the runs that have ended, by name."""
        found = _read_json(self.out / RESULTS) or {}
        return {str(name): float(loss) for name, loss in found.items()}

    def go(self) -> Findings:
        """Train what is not trained yet, fit, predict, and train what was predicted."""
        plan = self.plan
        with locked(self.out), Bar("sweep, of its seconds", self._worth(plan.runs)) as bar:
            bar.first = self._worth(one for one in plan.runs if one.name in self.results())
            for one in plan.fitted:
                self._train_once(one, bar)
            self._predict(bar)
            self._train_once(plan.target, bar)
            measure(self.out, self.results()[plan.target.name])
        return self.findings()

    def _worth(self, runs: Iterable[Planned]) -> int:
        """How much of the whole these runs are, by the time that was planned for them."""
        return math.ceil(sum(one.seconds for one in runs))

    def _train_once(self, planned: Planned, bar: Bar) -> None:
        if planned.name in self.results():
            return
        self._train(planned)
        ended = self.results()
        bar.update(self._worth(one for one in self.plan.runs if one.name in ended), planned.name)

    def _train(self, planned: Planned) -> None:
        """One run, into its folder; its loss is the validation at its last step."""
        folder = self.out / planned.name
        make_folder(folder)
        with locked(folder):
            drop_partials(folder)
            if not (folder / SETTINGS).exists():
                self.tokenizer.save(folder / TOKENIZER)
                write_text(folder / SETTINGS, to_toml(dump(planned.run)))
            self._trainer(planned.run, folder).run()
        step, loss = validation_curve(folder)[-1]
        assert step == planned.run.train.steps
        results = self.results() | {planned.name: loss}
        write_text(self.out / RESULTS, json.dumps(results, indent=2) + "\n")

    def _predict(self, bar: Bar) -> None:
        trained, target = self.trained(), self.plan.target
        band = joint_fit(trained).run(target.parameters, target.tokens)
        made = predict(self.out, target, band, trained)
        longer = without_shortest(trained, target.parameters, target.tokens)
        but = "" if longer is None else f"; without the shortest runs {longer.value:.4f}"
        bar.say(
            f"predicted for {target.flops / max(one.flops for one in trained):.1f} times the "
            f"compute: loss {made.loss:.4f}, {made.low:.4f} to {made.high:.4f} (made {made.made})"
            f"{but}"
        )

    def trained(self) -> tuple[Trained, ...]:
        results = self.results()
        return tuple(Trained.of(one, results[one.name]) for one in self.plan.fitted)

    def findings(self) -> Findings:
        trained, made = self.trained(), read(self.out)
        assert made is not None  # what has been trained was predicted
        most, largest = max(t.tokens for t in trained), max(t.parameters for t in trained)
        sizes = {one.parameters: one.token_flops for one in self.plan.runs}
        return Findings(
            trained,
            joint_fit(trained),
            _one_term([(t.parameters, t.loss) for t in trained if t.tokens == most]),
            _one_term([(t.tokens, t.loss) for t in trained if t.parameters == largest]),
            Price.of(list(sizes), list(sizes.values())),
            made,
            without_shortest(trained, made.parameters, made.tokens),
        )


@lru_cache(maxsize=4)
def joint_fit(trained: tuple[Trained, ...]) -> Fit:
    """L(N, D) of these runs."""
    causes = np.array([(one.parameters, one.tokens) for one in trained], dtype=float)
    return fit(causes, np.array([one.loss for one in trained]))


def without_shortest(trained: tuple[Trained, ...], parameters: int, tokens: int) -> Band | None:
    """What the runs predict but for the shortest of each size, where enough are left."""
    amounts = sorted({one.tokens for one in trained})
    left = tuple(one for one in trained if one.tokens > amounts[0])
    if len(amounts) < 4 or len(left) <= 5:  # two amounts know no exponent, five runs no law
        return None
    return joint_fit(left).run(parameters, tokens)


def _one_term(points: list[tuple[int, float]]) -> Fit | None:
    if len(points) < 4:  # three numbers, and one point more
        return None
    causes, losses = zip(*points, strict=True)
    return fit(np.array(causes, dtype=float)[:, None], np.array(losses))


def with_text(run: Run, out: Path) -> Run:
    """The recipe; where it names no text, with the phrasebook's English, written once."""
    assert isinstance(run.data, TextData)
    if run.data.folder or run.data.file:
        return run
    folder = out / TEXT
    make_folder(folder)
    for split, (seeds, count) in SENTENCES.items():
        path = folder / f"phrasebook.{split}.txt"
        if not path.exists():
            drawn = (
                pair for seed in range(seeds) for pair in sentences("en-de", split, count, seed)
            )
            write_text(path, "".join(f"{pair.source}\n" for pair in drawn))
    data = dataclasses.replace(run.data, folder=str(folder))
    return dataclasses.replace(run, data=data)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise DataError(f"{path} is damaged: choose another --out") from None
