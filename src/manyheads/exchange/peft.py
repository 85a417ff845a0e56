"""LoRA adapters as folders of PEFT: adapter_config.json and adapter_model.safetensors.

A run keeps merged weights. Its update of each matrix has a low rank, so the singular value
decomposition of (merged − base) gives B A again. Other trained modules are stored completely.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from manyheads.errors import DataError, UserError
from manyheads.exchange.family import Family
from manyheads.nn.lora import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Tasks of PEFT by the end of a class's name.
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "MTModel": "SEQ_2_SEQ_LM",
}
# Settings of an adapter that change what it computes, and their only supported value.
ONLY = {"peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False}
ONLY |= {"rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}


def write_adapter(
    family: Family, model: Any, base: Any, lora: Lora, start: str, folder: Path
) -> None:
    """Write the difference of two models of `transformers`: one with merged updates, its base."""
    layer = family.layer.replace("{stack}", "(encoder|decoder)").replace("{n}", r"\d+")
    state, before = model.state_dict(), base.state_dict()
    updates, saved, rank = {}, set(), lora.rank
    for name, tensor in state.items():
        module = name.rpartition(".")[0]
        if torch.equal(tensor, before[name]):
            continue
        if tensor.ndim == 2 and re.match(layer, family.canonical(name)):
            delta = (tensor - before[name]).double()
            u, s, v = torch.linalg.svd(delta.T if family.transposed else delta, full_matrices=False)
            updates[module] = u, s, v
            # An average of checkpoints has a higher rank than each of them.
            noise = 1e-4 * s[0] + torch.finfo(tensor.dtype).eps * tensor.norm()
            rank = max(rank, int((s > noise).sum()))
        else:
            saved.add(module)
    tensors = {name: x for name, x in state.items() if name.rpartition(".")[0] in saved}
    for module, (u, s, v) in updates.items():
        root = s[:rank].sqrt()
        tensors[f"{module}.lora_A.weight"] = _padded(root[:, None] * v[:rank], rank)
        b = u[:, :rank] * root * (rank / lora.alpha)
        tensors[f"{module}.lora_B.weight"] = _padded(b.T, rank).T
    name = type(model).__name__
    config = {
        **ONLY,
        "task_type": next((task for end, task in TASKS.items() if name.endswith(end)), None),
        "base_model_name_or_path": start,
        "r": rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "fan_in_fan_out": family.transposed,
        "target_modules": sorted(updates),
        "modules_to_save": sorted(saved) or None,
        "inference_mode": True,
    }
    stored = {PREFIX + name: x.to(model.dtype).contiguous() for name, x in tensors.items()}
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _padded(rows: Tensor, rank: int) -> Tensor:
    """A matrix may be smaller than the rank."""
    return F.pad(rows, (0, 0, 0, rank - len(rows)))


def base_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """The folder of the model that an adapter belongs to."""
    for name, value in ONLY.items():
        if config.get(name) not in (value, None):
            raise UserError(
                f"{folder / CONFIG} has {name}={config[name]}: only {value} is supported"
            )
    base = Path(str(config.get("base_model_name_or_path")))
    for path in (base, folder / base):
        if path.is_dir():
            return path
    raise UserError(
        f"{folder} is an adapter of {base}, which is not a folder here: set "
        f"base_model_name_or_path in {CONFIG} to the folder of that model"
    )


def merge_adapter(
    family: Family,
    settings: dict[str, Any],
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    adapter: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The tensors of a base model with an adapter, by canonical name; the class may have a head."""
    merged = {family.canonical(name): tensor for name, tensor in tensors.items()}
    try:
        scale = config["lora_alpha"] / config["r"]
        pairs = {x: adapter[x.replace("lora_A", "lora_B")] for x in adapter if "lora_A" in x}
    except (LookupError, TypeError, ArithmeticError) as error:
        raise DataError(f"the adapter is incomplete ({error!r}): copy it again") from None
    for name, tensor in adapter.items():
        target = family.canonical(name.removeprefix(PREFIX).replace(".modules_to_save", ""))
        if target.endswith(".lora_A.weight"):
            update = scale * pairs[name] @ tensor
            update = update.T if config.get("fan_in_fan_out") else update
            target = target.replace(".lora_A", "")
            if target not in merged or merged[target].shape != update.shape:
                raise DataError(f"the adapter changes {target}, which its base model lacks")
            merged[target] = merged[target] + update
        elif not target.endswith(".lora_B.weight"):
            merged[target] = tensor
    for end, task in TASKS.items():
        names = [name for name in family.architectures if name.endswith(end)]
        if task == config.get("task_type") and names:
            settings["architectures"] = names[:1]
    head = f"{family.variants.get('classify', {}).get('head.output')}.weight"
    if head in merged:
        settings["num_labels"] = len(merged[head])
    return merged
