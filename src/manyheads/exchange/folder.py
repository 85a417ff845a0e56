"""Folders of Hugging Face: generation settings read into our `Decode`, and folders written."""

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
from torch import nn

from manyheads.baselines.elmo import ElmoConfig
from manyheads.config import Natural, parse
from manyheads.decode.beam import Decode, SpecialTokens
from manyheads.errors import DataError, UserError
from manyheads.exchange.families import PREPROCESSOR, write_preprocessor
from manyheads.exchange.huggingface import (
    TOKENIZER,
    ImportedModel,
    import_transformers,
    plan_export,
    to_huggingface,
)
from manyheads.exchange.peft import write_adapter
from manyheads.fileio import replace_files
from manyheads.models.bert import BertConfig
from manyheads.models.decoder_only_seq2seq import EncoderDecoderConfig
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vit import Vit
from manyheads.nn.lora import Lora
from manyheads.tokenizer.tokenizer import Tokenizer

# Our special tokens of a tokenizer, and their names there.
SPECIAL_TOKENS = {
    "pad": "pad_token",
    "start": "bos_token",
    "end": "eos_token",
    "unknown": "unk_token",
    "mask": "mask_token",
    "separator": "sep_token",
    "classify": "cls_token",
}
EARLY_STOPPING: dict[Any, Any] = {False: "heuristic", True: "early", "never": "exact"}
# Settings of `generate` that we do not have, and the values of them that change nothing.
UNSUPPORTED = (
    "do_sample",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "sequence_bias",
    "guidance_scale",
    "renormalize_logits",
    "num_beam_groups",
    "stop_strings",
)
NEUTRAL: tuple[Any, ...] = (None, 0, 1, [])
Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The settings of `generate` that we have too. A text may end with any of several tokens there;
    we use the first.
    """

    num_beams: Natural = 1
    length_penalty: float = 1.0
    early_stopping: Literal[False, True, "never"] = False
    min_length: Natural = 0
    min_new_tokens: Natural | None = None
    bos_token_id: Ids = ()
    eos_token_id: Ids = ()
    decoder_start_token_id: Ids = ()
    forced_bos_token_id: Ids = ()
    forced_eos_token_id: Ids = ()
    suppress_tokens: Ids = ()
    bad_words_ids: tuple[Ids, ...] = ()


def generation_settings(imported: ImportedModel) -> tuple[Generation, list[str]]:
    """Settings of config.json and of generation_config.json, which takes precedence.

    With them the names of those that have no effect here. null is a setting left out.
    """
    values: dict[str, Any] = {}
    for table in (imported.settings, imported.generation):
        values |= {name: value for name, value in table.items() if value is not None}
    table = {f.name: values[f.name] for f in dataclasses.fields(Generation) if f.name in values}
    for name, value in table.items():
        if name.endswith("_id") and not isinstance(value, list):
            table[name] = [value]
    try:
        known = parse(Generation, table, "generation")
    except UserError as error:
        raise DataError(f"the folder's generation settings are not valid: {error}") from None
    unsupported = [
        name for name in UNSUPPORTED if values.get(name) is True or values.get(name) not in NEUTRAL
    ]
    if isinstance(imported.model, Gpt) and known.min_length and known.min_new_tokens is None:
        unsupported.append("min_length")  # it counts the prompt, of any length
    if any(len(words) > 1 for words in known.bad_words_ids):
        unsupported.append("bad_words_ids of several tokens")
    if len(known.eos_token_id) > 1:
        unsupported.append("eos_token_id after the first")
    return known, unsupported


def decode_from_hf(imported: ImportedModel) -> Decode:
    """The generation settings of a folder in our terms; docs/models.md lists the differences."""
    if not isinstance(imported.model, Seq2Seq | Gpt):
        return Decode()
    (known, _), is_seq2seq = generation_settings(imported), isinstance(imported.model, Seq2Seq)
    # Theirs counts the start token of a translation, and the prompt of a text, of any length.
    least = max(0, known.min_length - 1) if is_seq2seq else 0
    single = [words[0] for words in known.bad_words_ids if len(words) == 1]
    end = _first(known.eos_token_id)
    settings: dict[str, Any] = {
        "beam": known.num_beams,
        "length_penalty": known.length_penalty,
        "penalty": "length",
        "stopping": EARLY_STOPPING[known.early_stopping],
        "at_limit": "truncate",
        "min_length": least if known.min_new_tokens is None else known.min_new_tokens,
        "start": _first(known.bos_token_id),
        "end": end,
        "suppress_tokens": tuple(dict.fromkeys([*single, *known.suppress_tokens])),
    }
    if is_seq2seq:
        settings["forced_bos"] = _first(known.forced_bos_token_id)
        settings["source_start"] = _source_start(imported.tokenizer, end)
        if known.decoder_start_token_id:
            settings["start"] = _first(known.decoder_start_token_id)
        if known.forced_eos_token_id:
            settings["at_limit"] = "force-eos-free"
    try:
        return parse(Decode, settings, "decode")
    except UserError as error:
        raise DataError(f"the folder's generation settings are not supported: {error}") from None


def _first(ids: Ids) -> int | None:
    return ids[0] if ids else None


def _source_start(tokenizer: Tokenizer | None, end: int | None) -> int | None:
    """The token before every source; any other special token but an end after it is refused."""
    if tokenizer is None:
        return None
    before, after = tokenizer.frame()
    last = known_token(tokenizer, "end") if end is None else end
    if len(before) > 1 or after not in ([], [last]):
        shown = " ".join(str(tokenizer.content(token)) for token in (*before, *after))
        raise UserError(
            f"{TOKENIZER} adds the special tokens {shown} to a source: only one token before it, "
            "and the end after it, are supported"
        )
    return _first(tuple(before))


def unsupported_generation(imported: ImportedModel) -> list[str]:
    """A line that names the generation settings of a folder that have no effect here, if any."""
    if not isinstance(imported.model, Seq2Seq | Gpt):
        return []
    _, names = generation_settings(imported)
    return [f"generation settings with no effect here: {', '.join(names)}"] if names else []


def known_token(tokenizer: Tokenizer | None, name: str) -> int | None:
    """A special token, or None if the tokenizer lacks it, as imported ones may."""
    try:
        return None if tokenizer is None else int(getattr(tokenizer, name))
    except UserError:
        return None


def special_token_ids(
    tokenizer: Tokenizer | None, decode: Decode, model: nn.Module
) -> dict[str, int]:
    """Their settings for the special tokens: those that the model generates with, and padding."""
    ids: dict[str, int | None] = {"pad_token_id": known_token(tokenizer, "pad")}
    if isinstance(model, Seq2Seq | Gpt):
        start = known_token(tokenizer, "start") if decode.start is None else decode.start
        end = known_token(tokenizer, "end") if decode.end is None else decode.end
        ids |= {"bos_token_id": start, "eos_token_id": end}
    if isinstance(model, Seq2Seq):
        ids["bos_token_id"] = known_token(tokenizer, "start")
        ids["decoder_start_token_id"] = start
        ids["forced_bos_token_id"] = decode.forced_bos
        ids["forced_eos_token_id"] = None if decode.at_limit == "truncate" else end
    return {name: token for name, token in ids.items() if token is not None}


def set_generation(theirs: Any, model: Seq2Seq | Gpt, special: SpecialTokens) -> None:
    """Give their model our generation settings as far as it has them; see `their_decoding`."""
    decode, generation = special.decode, theirs.generation_config
    generation.num_beams = decode.beam
    if decode.beam > 1:
        stopping = next(x for x, ours in EARLY_STOPPING.items() if ours == decode.stopping)
        generation.length_penalty, generation.early_stopping = decode.length_penalty, stopping
    else:  # they refuse to save settings of beam search without a beam
        generation.length_penalty = generation.early_stopping = None
    generation.max_length = model.config.max_length + 1  # the last token is generated, never read
    generation.min_new_tokens = decode.min_length or None
    generation.eos_token_id = special.end
    generation.bad_words_ids = [
        [token] for token in special.suppressed if token != special.end
    ] or None
    if isinstance(model, Seq2Seq):
        generation.decoder_start_token_id = special.start
        generation.forced_eos_token_id = None if decode.at_limit == "truncate" else special.end
        generation.forced_bos_token_id = decode.forced_bos
    theirs.config.forced_eos_token_id = None  # only in the generation config


def their_decoding(decode: Decode, model: nn.Module) -> dict[str, Any]:
    """The decoding settings that `transformers` does not let us choose.

    Its penalty is |y|^α, with the same α; a forced end costs nothing; and it stores no α for a
    single beam, which does not use it.
    """
    theirs: dict[str, Any] = {}
    if decode.beam == 1:
        theirs["length_penalty"] = 1.0
    elif decode.length_penalty:
        theirs["penalty"] = "length"
    cut = isinstance(model, Gpt) or decode.at_limit == "truncate"
    return {**theirs, "at_limit": "truncate" if cut else "force-eos-free"}


def write_huggingface(
    model: nn.Module, tokenizer: Tokenizer | None, decode: Decode, folder: Path
) -> None:
    """Write config.json, safetensors, tokenizer.json and generation_config.json, all or nothing.

    A model of images has preprocessor_config.json instead of the last two.
    """
    theirs = _theirs(model, tokenizer, decode)
    if tokenizer is not None and isinstance(model, Seq2Seq | Gpt):
        set_generation(theirs, model, SpecialTokens(tokenizer, decode))
    import_transformers().utils.logging.disable_progress_bar()  # there is only one file
    with replace_files(folder) as temporary:
        theirs.save_pretrained(temporary)
        if tokenizer is not None:
            _their_tokenizer(tokenizer, model, decode).save_pretrained(temporary)
        if isinstance(model, Vit) and model.config.pixel_mean:
            table = json.dumps(write_preprocessor(model.config), indent=2)
            (temporary / PREPROCESSOR).write_text(table + "\n", encoding="utf-8")


def write_peft(
    model: nn.Module,
    base: nn.Module,
    tokenizer: Tokenizer | None,
    decode: Decode,
    lora: Lora,
    start: Path,
    folder: Path,
) -> None:
    """Write the LoRA adapter of a model that was trained from `base`, in the folder `start`."""
    family = plan_export(model)[1].family
    theirs, before = (_theirs(x, tokenizer, decode) for x in (model, base))
    with replace_files(folder) as temporary:
        write_adapter(family, theirs, before, lora, str(start), temporary)


def _theirs(model: nn.Module, tokenizer: Tokenizer | None, decode: Decode) -> Any:
    marked = copy.copy(model)  # the same weights; the caller's model does not change
    marked.special = special_token_ids(tokenizer, decode, model)  # type: ignore[assignment]
    return to_huggingface(marked)


def frame_for_model(tokenizer: Tokenizer, decode: Decode, config: Any) -> Tokenizer:
    """The tokenizer with the special tokens that a model expects around a text.

    Those of the tokenizer if it has any, else ours.
    """
    if any(tokenizer.frame()):
        return tokenizer
    if isinstance(config, EncoderDecoderConfig):
        *before, end = SpecialTokens(tokenizer, decode).source([])
        return tokenizer.with_frame(before, [end])
    if not isinstance(config, BertConfig | ElmoConfig):
        return tokenizer
    first, last = known_token(tokenizer, "classify"), known_token(tokenizer, "separator")
    if isinstance(config, BertConfig) and config.causal and (first is None or last is None):
        return tokenizer.with_frame([], [SpecialTokens(tokenizer, decode).end])
    if first is None or last is None:
        raise UserError(
            "this tokenizer adds no special tokens and has no [CLS] and [SEP], which the model "
            "needs: use the model's own tokenizer.json"
        )
    return tokenizer.with_frame([first], [last])


def _their_tokenizer(tokenizer: Tokenizer, model: nn.Module, decode: Decode) -> Any:
    ids = {theirs: known_token(tokenizer, ours) for ours, theirs in SPECIAL_TOKENS.items()}
    special = {name: tokenizer.content(x) for name, x in ids.items() if x is not None}
    try:
        framed = frame_for_model(tokenizer, decode, model.config)
    except UserError:  # no text is encoded here: the tokenizer is exported unchanged
        framed = tokenizer
    inner = tokenizers.Tokenizer.from_str(framed.to_json())
    kind = import_transformers().PreTrainedTokenizerFast
    config: Any = model.config
    return kind(tokenizer_object=inner, model_max_length=config.max_length, **special)
