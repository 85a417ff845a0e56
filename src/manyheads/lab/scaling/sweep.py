"""A sweep in its folder: planned, trained run by run, fitted, predicted, checked.

OUT/plan.json has the plan, OUT/results.json the losses of finished runs, OUT/prediction.json the
prediction and the measured loss; each run has an ordinary run folder in OUT. OUT/text has the
built-in text, if the recipe does not set another.
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
# The built-in text: seeds and sentences per seed of each split.
SENTENCES = {"train": (6, 50_000), "valid": (1, 2_000)}
WARM, TIMED = 2, 4  # warm-up steps, and timed steps


@dataclasses.dataclass(frozen=True)
class Findings:
    """The results of a sweep: runs, laws, FLOPs per token, and the prediction.

    `by_size` is the law of N at the most tokens and `by_data` that of D in the largest model, None
    with too few points. `longer` is the prediction without the shortest runs: if it is far from
    the prediction, these follow another law.
    """

    trained: tuple[Trained, ...]
    joint: Fit
    by_size: Fit | None
    by_data: Fit | None
    price: Price
    prediction: Prediction
    longer: Band | None


class Scaling:
    """A sweep of a recipe in a folder; all its runs share text, tokenizer and task."""

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
        """The number of epochs of the predicted run."""
        return self.plan.target.run.train.steps / self.task.per_epoch

    def _planned(self) -> Plan:
        """The plan saved in the folder, or a new one if none of its runs has begun."""
        request = {
            "recipe": dump(self.run),
            "sizes": self.sweep.sizes,
            "data": self.sweep.data,
            "budget": self.sweep.budget or 0.0,
            "text": self.task.digest,
        }
        saved = _read_json(self.out / PLAN)
        changes = ["it has no plan"] if saved is None else differences(request, saved["asked"])
        if not changes and saved is not None:
            return self._plan(saved["steps"], saved["seconds_per_step"])
        if self.results() or begun(self.out) or list(self.out.glob(f"*/{SETTINGS}")):
            raise UserError(f"{self.out} holds another sweep ({changes[0]}): choose another --out")
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
        about = {"asked": request, "steps": steps, "seconds_per_step": seconds}
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
        """Measured seconds per step of each size."""
        seconds = {}
        with tempfile.TemporaryDirectory() as folder:
            for run in sizes_of(self.run, self.sweep):
                trainer = self._trainer(run, Path(folder))
                for step in range(WARM + TIMED):
                    if step == WARM:
                        began = self._now()
                    trainer.step(step)
                seconds[f"{run.model.dim}x{run.model.layers}"] = (self._now() - began) / TIMED
                trainer.close()
        return seconds

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
        """The losses of finished runs, by name."""
        losses = _read_json(self.out / RESULTS) or {}
        return {str(name): float(loss) for name, loss in losses.items()}

    def go(self) -> Findings:
        """Train the remaining runs, fit the laws, predict, and train the predicted run."""
        plan = self.plan
        with locked(self.out), Bar("sweep, of its seconds", self._worth(plan.runs)) as bar:
            bar.first = self._worth(
                planned for planned in plan.runs if planned.name in self.results()
            )
            for planned in plan.fitted:
                self._train_once(planned, bar)
            self._predict(bar)
            self._train_once(plan.target, bar)
            measure(self.out, self.results()[plan.target.name])
        return self.findings()

    def _worth(self, runs: Iterable[Planned]) -> int:
        """The planned seconds of these runs, as progress of the bar."""
        return math.ceil(sum(planned.seconds for planned in runs))

    def _train_once(self, planned: Planned, bar: Bar) -> None:
        if planned.name in self.results():
            return
        self._train(planned)
        ended = self.results()
        bar.update(self._worth(run for run in self.plan.runs if run.name in ended), planned.name)

    def _train(self, planned: Planned) -> None:
        """Train one run in its folder; its result is the validation loss of its last step."""
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
            f"predicted for {target.flops / max(run.flops for run in trained):.1f} times the "
            f"compute: loss {made.loss:.4f}, {made.low:.4f} to {made.high:.4f} (made {made.made})"
            f"{but}"
        )

    def trained(self) -> tuple[Trained, ...]:
        results = self.results()
        return tuple(Trained.of(planned, results[planned.name]) for planned in self.plan.fitted)

    def findings(self) -> Findings:
        trained, made = self.trained(), read(self.out)
        assert made is not None  # `go` predicts before it trains the target
        most, largest = max(t.tokens for t in trained), max(t.parameters for t in trained)
        sizes = {planned.parameters: planned.token_flops for planned in self.plan.runs}
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
    """Fit L(N, D) to these runs."""
    causes = np.array([(run.parameters, run.tokens) for run in trained], dtype=float)
    return fit(causes, np.array([run.loss for run in trained]))


def without_shortest(trained: tuple[Trained, ...], parameters: int, tokens: int) -> Band | None:
    """The prediction without the shortest run of each size; None if too few runs remain."""
    amounts = sorted({run.tokens for run in trained})
    left = tuple(run for run in trained if run.tokens > amounts[0])
    if len(amounts) < 4 or len(left) <= 5:  # too few to fit exponents
        return None
    return joint_fit(left).run(parameters, tokens)


def _one_term(points: list[tuple[int, float]]) -> Fit | None:
    if len(points) < 4:  # one more than the three parameters
        return None
    causes, losses = zip(*points, strict=True)
    return fit(np.array(causes, dtype=float)[:, None], np.array(losses))


def with_text(run: Run, out: Path) -> Run:
    """The recipe, with the phrasebook's English as its text if it does not set any."""
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
