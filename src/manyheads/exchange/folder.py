"""Folders of `transformers`: generation settings read into our Decode, and folders written."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from torch import nn

from manyheads.baselines.elmo import ElmoConfig
from manyheads.config import parse
from manyheads.decode.beam import Decode, SpecialTokens
from manyheads.errors import DataError, UserError
from manyheads.exchange.families import PREPROCESSOR, write_preprocessor
from manyheads.exchange.huggingface import (
    CONFIG,
    GENERATION,
    TOKENIZER,
    ImportedModel,
    import_transformers,
    to_huggingface,
)
from manyheads.fileio import replace_files
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import EncoderDecoderConfig
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vit import Vit
from manyheads.tokenizer.tokenizer import Tokenizer

# Their names for the special tokens that a tokenizer may have.
NAMED = {
    "pad": "pad_token",
    "start": "bos_token",
    "end": "eos_token",
    "unknown": "unk_token",
    "mask": "mask_token",
    "separator": "sep_token",
    "classify": "cls_token",
}
STOPPING: dict[Any, Any] = {
    False: "heuristic",
    True: "early",
    "never": "exact",
}
STOPPING_THERE = {ours: theirs for theirs, ours in STOPPING.items()}
# What `generate` can be told there and our writing has not, and the value that asks for nothing.
NOT_DONE: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "exponential_decay_length_penalty": None,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "renormalize_logits": False,
    "constraints": None,
    "force_words_ids": None,
    "forced_decoder_ids": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "stop_strings": None,
}
DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
LONGEST_VALUE = 60


@dataclass(frozen=True)
class GenerationSettings:
    """Their settings by name, and the file that has each; null is a setting left out.

    What both files have holds as generation_config.json has it.
    """

    values: dict[str, Any]
    files: dict[str, str]
    vocabulary: int

    @classmethod
    def of(cls, imported: ImportedModel) -> "GenerationSettings":
        values: dict[str, Any] = {}
        files: dict[str, str] = {}
        for file, table in ((CONFIG, imported.settings), (GENERATION, imported.generation)):
            known = {name: value for name, value in table.items() if value is not None}
            values |= known
            files |= dict.fromkeys(known, file)
        return cls(values, files, vocabulary(imported.model))

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30:
            raise self.refusal(name, "a number")
        return float(value)

    def count(self, name: str, default: int = 0) -> int:
        value = self.values.get(name, default)
        if not _is_count(value):
            raise self.refusal(name, "a whole number")
        return int(value)

    def tokens(self, name: str) -> list[int]:
        value = self.values.get(name, [])
        return self._tokens(name, value if isinstance(value, list) else [value])

    def token(self, name: str) -> int | None:
        """Some models end with any of several tokens; the first is the usual one."""
        return next(iter(self.tokens(name)), None)

    def sequences(self, name: str) -> list[list[int]]:
        value = self.values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(one, list) for one in value):
            raise self.refusal(name, "a list of lists of tokens")
        return [self._tokens(name, one) for one in value]

    def choice(self, name: str, known: dict[Any, Any], default: Any) -> Any:
        value = self.values.get(name, default)
        # 0 and 1 would be found as False and True.
        if not isinstance(value, bool | str) or value not in known:
            raise self.refusal(name, f"one of {', '.join(map(str, known))}")
        return known[value]

    def said(self, name: str) -> str:
        value = " ".join(str(self.values[name]).split())
        return f"{name}={value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + '…'}"

    def refusal(self, name: str, wanted: str) -> DataError:
        return DataError(f"{self.files[name]} has {self.said(name)}: it must be {wanted}")

    def _tokens(self, name: str, found: list[Any]) -> list[int]:
        if not all(_is_count(token) and token < self.vocabulary for token in found):
            raise self.refusal(name, f"among the model's tokens, 0 to {self.vocabulary - 1}")
        return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def vocabulary(model: nn.Module) -> int:
    """How many tokens a model has to write; none where it does not write."""
    if isinstance(model, Seq2Seq):
        return model.target_table.num_embeddings
    return model.tokens.num_embeddings if isinstance(model, Gpt) else 0


def decode_of(imported: ImportedModel) -> Decode:
    """How the model is told to write there, in our terms; docs/models.md says where they differ."""
    if not isinstance(imported.model, Seq2Seq | Gpt):
        return Decode()
    told, paired = GenerationSettings.of(imported), isinstance(imported.model, Seq2Seq)
    single = [words[0] for words in told.sequences("bad_words_ids") if len(words) == 1]
    start = told.token("decoder_start_token_id") if paired else None
    first = told.token("forced_bos_token_id") if paired else None
    end = told.token("eos_token_id")
    forced = told.token("forced_eos_token_id") if paired else None
    settings: dict[str, Any] = {
        "beam": told.count("num_beams", 1),
        "length_penalty": told.number("length_penalty", 1.0),
        "penalty": "length",
        "stopping": told.choice("early_stopping", STOPPING, False),
        "at_limit": "truncate" if forced is None else "force-eos-free",
        "min_length": _shortest(told, paired),
        "forced_bos": first,
        "start": told.token("bos_token_id") if start is None else start,
        "end": end,
        "suppress_tokens": tuple(dict.fromkeys([*single, *told.tokens("suppress_tokens")])),
        "source_start": _source_start(imported.tokenizer, end) if paired else None,
    }
    try:
        return parse(Decode, settings, "decode")
    except UserError as error:
        raise DataError(f"the model is told to write as cannot be done here: {error}") from None


def _shortest(told: GenerationSettings, paired: bool) -> int:
    least = told.count("min_length")
    if "min_new_tokens" in told.values:
        return told.count("min_new_tokens")
    # Theirs counts the start of a translation, and the prompt of a text, which may be any.
    return max(0, least - 1) if paired else 0


def _source_start(tokenizer: Tokenizer | None, end: int | None) -> int | None:
    """The token before every source; a frame that is more than that and an end is refused."""
    if tokenizer is None:
        return None
    before, after = tokenizer.frame()
    last = known(tokenizer, "end") if end is None else end
    if len(before) > 1 or after not in ([], [last]):
        shown = [str(tokenizer.content(token)) for token in (*before, *after)]
        frame = " ".join([*shown[: len(before)], "TEXT", *shown[len(before) :]])
        raise UserError(
            f"{TOKENIZER} frames a source as {frame}: only one token before it, and the end after "
            "it, are supported"
        )
    return before[0] if before else None


def not_done(imported: ImportedModel) -> list[str]:
    """What the model is told there of its writing and does otherwise here, a line each."""
    if not isinstance(imported.model, Seq2Seq | Gpt):
        return []
    told, paired = GenerationSettings.of(imported), isinstance(imported.model, Seq2Seq)
    asked = [name for name in NOT_DONE if told.values.get(name) not in (None, [], NOT_DONE[name])]
    if not paired and told.count("min_length") and "min_new_tokens" not in told.values:
        asked.append("min_length")
    notes = [
        f"{told.files[name]} asks for {told.said(name)} in writing, which is not done here"
        for name in asked
    ]
    if any(len(words) > 1 for words in told.sequences("bad_words_ids")):
        file = told.files["bad_words_ids"]
        notes.append(f"{file} bans several tokens in a row (bad_words_ids): here only single ones")
    if told.values.get("do_sample") is True:
        how = ", ".join(told.said(name) for name in DRAWING if name in told.values)
        ours = "translate searches unless told --sample" if paired else "generate's options say how"
        notes.append(f"{told.files['do_sample']} has texts drawn ({how or 'as they are'}): {ours}")
    ends = told.tokens("eos_token_id")
    if len(ends) > 1:
        notes.append(f"there a text ends with any of the tokens {ends}, here with {ends[0]} alone")
    if paired and imported.tokenizer and not imported.tokenizer.frame()[1]:
        notes.append(f"{TOKENIZER} puts no end after a text: here every source gets one")
    return notes


def known(tokenizer: Tokenizer | None, name: str) -> int | None:
    """A special token, where the tokenizer has it; files from elsewhere do not have them all."""
    try:
        return None if tokenizer is None else int(getattr(tokenizer, name))
    except UserError:
        return None


def special_of(tokenizer: Tokenizer | None, decode: Decode, model: nn.Module) -> dict[str, int]:
    """Their settings for the special tokens: those that the model writes with, and padding."""
    found: dict[str, int | None] = {"pad_token_id": known(tokenizer, "pad")}
    if isinstance(model, Seq2Seq | Gpt):
        start, end = (
            known(tokenizer, name) if own is None else own
            for name, own in (("start", decode.start), ("end", decode.end))
        )
        found |= {"bos_token_id": start, "eos_token_id": end}
    if isinstance(model, Seq2Seq):
        found["bos_token_id"] = known(tokenizer, "start")
        found["decoder_start_token_id"] = start
        found["forced_bos_token_id"] = decode.forced_bos
        found["forced_eos_token_id"] = None if decode.at_limit == "truncate" else end
    return {name: token for name, token in found.items() if token is not None}


def tell(theirs: Any, model: Seq2Seq | Gpt, marks: SpecialTokens) -> None:
    """Give their model our generation settings as far as it has them; see `changed_there`."""
    decode, generation = marks.decode, theirs.generation_config
    generation.num_beams = decode.beam
    # They refuse to save settings of beam search without a beam.
    generation.length_penalty = decode.length_penalty if decode.beam > 1 else None
    generation.early_stopping = STOPPING_THERE[decode.stopping] if decode.beam > 1 else None
    generation.max_length = model.config.max_length + 1  # the last token is generated, never read
    generation.min_new_tokens = decode.min_length or None
    generation.eos_token_id = marks.end
    generation.bad_words_ids = [[token] for token in marks.suppressed if token != marks.end] or None
    if isinstance(model, Seq2Seq):
        generation.decoder_start_token_id = marks.start
        generation.forced_eos_token_id = None if decode.at_limit == "truncate" else marks.end
        generation.forced_bos_token_id = decode.forced_bos
    theirs.config.forced_eos_token_id = None  # only in the generation config


def changed_there(decode: Decode, model: nn.Module) -> list[str]:
    """The settings of writing that `transformers` has otherwise, each `x=there in place of here`.

    Its penalty is |y|^α alone, with the same α; its end at the limit costs
    nothing; and it keeps no α that a single beam does not heed.
    """
    if not isinstance(model, Seq2Seq | Gpt):
        return []
    there = {
        "at_limit": "truncate"
        if isinstance(model, Gpt) or decode.at_limit == "truncate"
        else "force-eos-free",
    }
    ranked: dict[str, Any] = {}
    if decode.beam == 1:
        ranked = {"length_penalty": 1.0}
    elif decode.length_penalty:
        ranked = {"penalty": "length"}
    return [
        f"decode.{name}={value} in place of {getattr(decode, name)}"
        for name, value in {**ranked, **there}.items()
        if getattr(decode, name) != value
    ]


def write_huggingface(
    model: nn.Module, tokenizer: Tokenizer | None, decode: Decode, folder: Path
) -> list[str]:
    """Write config.json, safetensors, tokenizer.json and generation_config.json, all or nothing.

    A model of images has preprocessor_config.json instead of the last two.
    The settings of writing that `transformers` has otherwise are the answer.
    """
    marked = copy.copy(model)  # the same weights; the caller's model is left as it is
    marked.special = special_of(tokenizer, decode, model)  # type: ignore[assignment]
    theirs = to_huggingface(marked)
    if tokenizer is not None and isinstance(model, Seq2Seq | Gpt):
        tell(theirs, model, SpecialTokens(tokenizer, decode))
    import_transformers().utils.logging.disable_progress_bar()  # of a single file
    with replace_files(folder) as temporary:
        theirs.save_pretrained(temporary)
        if tokenizer is not None:
            _their_tokenizer(tokenizer, model, decode).save_pretrained(temporary)
        if isinstance(model, Vit) and model.config.pixel_mean:
            table = json.dumps(write_preprocessor(model.config), indent=2)
            (temporary / PREPROCESSOR).write_text(table + "\n", encoding="utf-8")
    return changed_there(decode, model) if tokenizer is not None else []


def in_frame(tokenizer: Tokenizer, decode: Decode, config: Any) -> Tokenizer:
    """With the special tokens around a text that such a model reads: its own, else ours."""
    if any(tokenizer.frame()):
        return tokenizer
    if isinstance(config, EncoderDecoderConfig):
        *before, end = SpecialTokens(tokenizer, decode).source([])
        return tokenizer.with_frame(before, [end])
    if not isinstance(config, BertConfig | ElmoConfig):
        return tokenizer
    first, last = known(tokenizer, "classify"), known(tokenizer, "separator")
    if first is None or last is None:
        raise UserError(
            "this tokenizer puts nothing around a text and has no [CLS] and [SEP] to put there, "
            "which the model reads: use the model's own tokenizer.json"
        )
    return tokenizer.with_frame([first], [last])


def _their_tokenizer(tokenizer: Tokenizer, model: nn.Module, decode: Decode) -> Any:
    ids = {theirs: known(tokenizer, ours) for ours, theirs in NAMED.items()}
    special = {name: tokenizer.content(x) for name, x in ids.items() if x is not None}
    try:
        framed = in_frame(tokenizer, decode, model.config)
    except UserError:  # nothing is read here: the tokenizer leaves as it came
        framed = tokenizer
    inner = tokenizers.Tokenizer.from_str(framed.to_json())
    kind = import_transformers().PreTrainedTokenizerFast
    config: Any = model.config
    return kind(tokenizer_object=inner, model_max_length=config.max_length, **special)
