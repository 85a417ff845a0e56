"""Folders of exchange/ctranslate2.py run by CTranslate2, with the faces of our translators."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from manyheads.decode.beam import Decode, Hypothesis, SpecialTokens, length_penalty
from manyheads.decode.generate import GREEDY, BaseGenerator
from manyheads.decode.sample import Sample
from manyheads.decode.translate import BaseTranslator
from manyheads.errors import DataError, UserError
from manyheads.exchange.ctranslate2 import SETTINGS, WEIGHTS, library
from manyheads.tokenizer.tokenizer import Tokenizer


class Ctranslate2Model:
    """A folder, opened by the `kind` of runner that its model needs; on a CPU with torch's threads.

    The device `auto` is a GPU where CTranslate2 sees one. Tokens go in and come out by name;
    `source` and `target` are the names by id.
    """

    def __init__(self, folder: Path, kind: str, device: str = "cpu") -> None:
        runner = getattr(library(), kind)
        if not (folder / WEIGHTS).is_file():
            raise UserError(
                f"there is no {folder / WEIGHTS}: give a folder exported to ctranslate2"
            )
        place, _, number = device.partition(":")
        if place == "cuda" and not library().get_cuda_device_count():
            raise UserError("CTranslate2 has no GPU to compute on here: use --device cpu or auto")
        try:
            self.runner = runner(
                str(folder),
                place,
                device_index=int(number or 0),
                intra_threads=torch.get_num_threads(),
            )
            self.settings: dict[str, Any] = json.loads((folder / SETTINGS).read_bytes())
            self.max_length = int(self.settings["max_length"])
            self.source, self.target = _vocabularies(folder)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{folder} is no model of ours ({reason}): export it again") from None
        self.ids = {name: number for number, name in enumerate(self.target)}

    def check(self, marks: SpecialTokens) -> None:
        """Refuse settings that this folder was not written with, or that cannot be honoured."""
        marks.check(len(self.target))
        wanted: dict[str, Any] = {"eos_token": self.target[marks.end]}
        if "decoder_start_token" in self.settings:
            before = marks.decode.source_start
            wanted["decoder_start_token"] = self.target[marks.start]
            wanted["add_source_bos"] = before is not None
            wanted |= {} if before is None else {"bos_token": self.target[before]}
        for name, value in wanted.items():
            if self.settings[name] != value:
                raise UserError(
                    f"this folder has {name} {self.settings[name]!r}, the settings {value!r}: "
                    "export the model again with these settings"
                )
        if marks.decode.beam > 1 and marks.decode.stopping != "beam-ended":
            raise UserError(
                f"CTranslate2 cannot stop by decode.stopping={marks.decode.stopping}: "
                "set decode.stopping=beam-ended"
            )

    def options(self, marks: SpecialTokens, wanted: int) -> dict[str, Any]:
        """What both kinds of runner are told of a search for so many hypotheses."""
        decode = marks.decode
        return {
            "beam_size": decode.beam,
            # All of them where there is a penalty: ranking them is ours.
            "num_hypotheses": decode.beam if decode.length_penalty else wanted,
            "length_penalty": decode.length_penalty,
            "suppress_sequences": [[self.target[x]] for x in marks.banned if x != marks.end],
            "end_token": [marks.end],
            "return_end_token": True,  # so that it counts in |y|, as ours does
            "return_scores": True,
            "max_batch_size": max(1, decode.read_at_once // decode.beam),
            "batch_type": "tokens",
        }

    def hypothesis(self, tokens: list[int], score: float, marks: SpecialTokens) -> Hypothesis:
        """A hypothesis of theirs, with the score that it has by our settings."""
        decode, length = marks.decode, max(1, len(tokens))  # nothing for an empty source
        log_probability = score * length**decode.length_penalty
        penalty = float(length_penalty(length, decode.length_penalty, decode.penalty))
        text = tokens[:-1] if tokens[-1:] == [marks.end] else tokens
        return Hypothesis(text, log_probability, log_probability / penalty)


def _vocabularies(folder: Path) -> tuple[list[str], list[str]]:
    """The names of source and target tokens."""
    for one in ("shared_vocabulary.json", "vocabulary.json"):
        if (folder / one).is_file():
            names = json.loads((folder / one).read_bytes())
            return names, names
    source, target = (folder / f"{side}_vocabulary.json" for side in ("source", "target"))
    return json.loads(source.read_bytes()), json.loads(target.read_bytes())


def _no_draws() -> UserError:
    return UserError(
        "CTranslate2 draws all texts from one stream of random numbers, seeded once, so that no "
        "seed gives a text again: search (--temperature 0, --beam), or use the run itself"
    )


def _best(found: list[Hypothesis], wanted: int) -> list[Hypothesis]:
    return sorted(found, key=lambda hypothesis: -hypothesis.score)[:wanted]


@dataclass(frozen=True)
class Ctranslate2Translator(BaseTranslator):
    """An encoder–decoder in a folder, with its tokenizer and the settings it writes with.

    The search is CTranslate2's own (read in its sources, and measured): like ours it extends
    the `beam` likeliest texts by log P alone, and ranks those that have ended by log P / lp,
    here with the lp of decode.penalty. It differs from ours in this:

    - a banned token has no probability: the others share its part, so that log P is the one
      given that none of them is written (ours leaves their part unused);
    - with a length penalty it stops when `beam` hypotheses have ended, as ours does, and gives
      the best `beam` by |y|^α; without one when the likeliest of a step's texts has just ended
      and there are as many as are wanted, so that it may look on where ours has stopped;
    - at the length limit a text is cut as it stands (decode.at_limit=cut);
    - after decode.first only the likeliest text may end at once;
    - an empty source is not read: its translation is empty, and certain.
    """

    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode

    @property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def vocabulary(self) -> int:
        return len(self.model.target)

    def search(
        self,
        sentences: Sequence[str],
        advance: Callable[[int], None] = lambda done: None,
        n_best: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The n best hypotheses of each sentence (the whole beam unless told), best first."""
        marks, first = self.special_tokens, self.decode.first
        self.model.check(marks)
        wanted = min(n_best or self.decode.beam, self.decode.beam)
        options = self.model.options(marks, wanted)
        encoded = self.tokenizer.encode_batch(sentences)
        limits = [self._limit(len(marks.source(ids))) for ids in encoded]
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        done = 0
        # A limit belongs to a whole call: one for each, so that no neighbour changes it.
        for limit in sorted(set(limits)):
            rows = [row for row, own in enumerate(limits) if own == limit]
            found = self.model.runner.translate_batch(
                [[self.model.source[token] for token in encoded[row]] for row in rows],
                None if first is None else [[self.model.target[first]]] * len(rows),
                **options,
                min_decoding_length=min(self.decode.shortest, limit),
                max_decoding_length=limit,
                max_input_length=0,
            )
            for row, result in zip(rows, found, strict=True):
                tokens = ([self.model.ids[name] for name in names] for names in result.hypotheses)
                pairs = zip(tokens, result.scores, strict=True)
                results[row] = _best(
                    [self.model.hypothesis(*pair, marks) for pair in pairs], wanted
                )
            done += len(rows)
            advance(done)
        return results

    def sample(self, sentences: Sequence[str], sample: Sample, first: int = 0) -> list[str]:
        if sample.temperature > 0:
            raise _no_draws()
        return replace(self, decode=replace(self.decode, beam=1)).translate(sentences)

    def _limit(self, length: int) -> int:
        if length > self.max_length:
            raise UserError(
                f"a source of {length} tokens, but this folder's positions end at "
                f"{self.max_length}: shorten it, or export a model with a larger max_length"
            )
        return self.decode.limit(length, self.max_length)


@dataclass(frozen=True)
class Ctranslate2Generator(BaseGenerator):
    """A decoder-only model in a folder, with its tokenizer and the settings it writes with.

    The search is that of the translator. A text ends with the model's max_length at the latest.
    """

    draws: ClassVar[bool] = False
    model: Ctranslate2Model
    tokenizer: Tokenizer
    decode: Decode
    warn: Callable[[str], None] = lambda line: None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # of the tokens that go in

    @property
    def positions(self) -> int:
        return self.model.max_length

    @property
    def vocabulary(self) -> int:
        return len(self.model.target)

    def generate(self, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        """The best continuation of each prompt, without the end."""
        return [found[0].tokens for found in self.search(prompts, limit, n_best=1)]

    def search(
        self, prompts: Sequence[Sequence[int]], limit: int, n_best: int | None = None
    ) -> list[list[Hypothesis]]:
        """The n best continuations of each prompt (the whole beam unless told), best first."""
        marks, wanted = self.special_tokens, min(n_best or self.decode.beam, self.decode.beam)
        self.model.check(marks)
        if self.decode.first is not None:
            raise UserError("decode.first is for translations: put the token at the prompt's end")
        results: list[list[Hypothesis]] = [[] for _ in prompts]
        # Prompts of one length are read at once; in a mixed batch the ends of longer ones would
        # be written under constraint, and then only the first beam may end at once.
        for rows, read, limits in self._batches(prompts, limit, self.decode.beam):
            room = int(limits[0])
            found = self.model.runner.generate_batch(
                [[self.model.target[token] for token in prompt] for prompt in read.tolist()],
                **self.model.options(marks, wanted),
                min_length=min(self.decode.shortest, room),
                max_length=room,
                include_prompt_in_result=False,
            )
            for row, result in zip(rows, found, strict=True):
                pairs = zip(result.sequences_ids, result.scores, strict=True)
                results[row] = _best(
                    [self.model.hypothesis(*pair, marks) for pair in pairs], wanted
                )
        return results

    def sample(
        self, prompts: Sequence[Sequence[int]], limit: int, sample: Sample, first: int = 0
    ) -> list[list[int]]:
        if sample.temperature > 0:
            raise _no_draws()
        return replace(self, decode=replace(self.decode, beam=1)).generate(prompts, limit)

    def stream(
        self, prompt: Sequence[int], limit: int, sample: Sample | None = None, first: int = 0
    ) -> Iterator[int]:
        """The likeliest tokens after a prompt, all of them at once."""
        return iter(self.sample([prompt], limit, sample or GREEDY, first)[0])
