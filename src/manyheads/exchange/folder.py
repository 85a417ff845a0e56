"""A model with its tokenizer and its way of writing as a folder that `transformers` opens."""

import os
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from torch import nn

from manyheads.decode.beam import Decode, Marks
from manyheads.errors import Mistake
from manyheads.exchange.huggingface import import_transformers, to_huggingface
from manyheads.files import PARTIAL
from manyheads.models.bert import BertConfig
from manyheads.models.gpt import Gpt
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.tokens import Tokenizer

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
STOPPING = {"none-better-now": False, "beam-ended": True, "none-better-ever": "never"}


def write_huggingface(
    model: nn.Module, tokenizer: Tokenizer | None, decode: Decode, folder: Path
) -> None:
    """Write config.json, safetensors, tokenizer.json and generation_config.json, all or nothing."""
    model.special = special_of(tokenizer, decode, model)  # type: ignore[assignment]
    theirs = to_huggingface(model)
    if tokenizer is not None and isinstance(model, Seq2Seq | Gpt):
        _say_how_to_write(theirs, model, Marks(tokenizer, decode))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(PARTIAL, f".{folder.name}.", folder.parent) as beside:
        theirs.save_pretrained(beside)
        if tokenizer is not None:
            _their_tokenizer(tokenizer, model, decode).save_pretrained(beside)
        folder.mkdir(exist_ok=True)
        for path in sorted(Path(beside).iterdir()):
            path.chmod(folder.stat().st_mode & 0o666)
            os.replace(path, folder / path.name)


def special_of(tokenizer: Tokenizer | None, decode: Decode, model: nn.Module) -> dict[str, int]:
    """Their settings for the special tokens: those that the model writes with, and padding."""
    found: dict[str, int | None] = {"pad_token_id": _known(tokenizer, "pad")}
    if isinstance(model, Seq2Seq | Gpt):
        start, end = (
            _known(tokenizer, name) if own is None else own
            for name, own in (("start", decode.start), ("end", decode.end))
        )
        found |= {"bos_token_id": start, "eos_token_id": end}
    if isinstance(model, Seq2Seq):
        found["bos_token_id"] = _known(tokenizer, "start")
        found["decoder_start_token_id"] = start
        found["forced_bos_token_id"] = decode.first
        found["forced_eos_token_id"] = None if decode.at_limit == "cut" else end
    return {name: token for name, token in found.items() if token is not None}


def _known(tokenizer: Tokenizer | None, name: str) -> int | None:
    try:
        return None if tokenizer is None else int(getattr(tokenizer, name))
    except Mistake:  # files from elsewhere do not have them all
        return None


def _say_how_to_write(theirs: Any, model: Seq2Seq | Gpt, marks: Marks) -> None:
    """Their settings of writing. A penalty of GNMT's form is theirs with the same exponent."""
    decode, told = marks.decode, theirs.generation_config
    told.num_beams = decode.beam
    told.length_penalty = decode.length_penalty if decode.beam > 1 else None
    told.early_stopping = STOPPING[decode.stopping] if decode.beam > 1 else None
    told.max_length = model.config.max_length + 1  # the last is written, and never read
    told.min_new_tokens = decode.shortest or None
    told.eos_token_id = marks.end
    told.bad_words_ids = [[token] for token in marks.banned if token != marks.end] or None
    if isinstance(model, Seq2Seq):
        told.decoder_start_token_id = marks.start
        told.forced_eos_token_id = None if decode.at_limit == "cut" else marks.end
        told.forced_bos_token_id = decode.first
    theirs.config.forced_eos_token_id = None  # said once, where writing is


def in_frame(tokenizer: Tokenizer, decode: Decode, config: Any) -> Tokenizer:
    """With the special tokens around a text that such a model reads: its own, else ours."""
    if any(tokenizer.frame()):
        return tokenizer
    if isinstance(config, Seq2SeqConfig):
        *before, end = Marks(tokenizer, decode).source([])
        return tokenizer.with_frame(before, [end])
    first, last = _known(tokenizer, "classify"), _known(tokenizer, "separator")
    if not isinstance(config, BertConfig) or first is None or last is None:
        return tokenizer
    return tokenizer.with_frame([first], [last])


def _their_tokenizer(tokenizer: Tokenizer, model: nn.Module, decode: Decode) -> Any:
    known = {theirs: _known(tokenizer, ours) for ours, theirs in NAMED.items()}
    special = {name: tokenizer.content(x) for name, x in known.items() if x is not None}
    inner = tokenizers.Tokenizer.from_str(in_frame(tokenizer, decode, model.config).to_json())
    return import_transformers().PreTrainedTokenizerFast(tokenizer_object=inner, **special)
