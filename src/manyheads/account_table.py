"""An account for people: counts with three digits, a table of parts and one of memory."""

from rich.console import Group
from rich.table import Table

from manyheads.account import PARTS, Account


def human(count: int) -> str:
    """A count with three digits: 65.1M, 1.32B."""
    return _scaled(count, 1000, ["", "K", "M", "B", "T", "Q"])


def human_bytes(count: int) -> str:
    return _scaled(count, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"])


def _scaled(count: int, step: int, units: list[str]) -> str:
    number, power = float(count), 0
    while round(number) >= 1000 and power < len(units) - 1:
        number, power = number / step, power + 1
    whole = power == 0 or round(number, 1) >= 100
    return f"{number:.0f}{units[power]}" if whole else f"{number:#.3g}{units[power]}"


def table(account: Account) -> Group:
    """For the terminal: a table of parameters and FLOPs by part, then one of memory."""
    return Group(_parts_table(account), _memory_table(account))


def _noun(token: str) -> str:
    return token if token in ("token", "patch") else f"{token} token"


def _parts_table(account: Account) -> Table:
    table = Table(title=f"{human(account.parameters)} parameters, FLOPs at length {account.length}")
    if account.block_parameters:
        share = account.feedforward_share
        table.caption = (
            f"feed-forward: {share['parameters']:.0%} of the blocks' parameters, "
            f"{share['flops']:.0%} of the FLOPs"
        )
    table.add_column("part")
    for name in ("parameters", "share", *(f"FLOPs / {_noun(token)}" for token in account.flops)):
        table.add_column(name, justify="right")
    for part in (f"{part}{work}" for part in PARTS for work in ("", " scores", " mixing")):
        size = account.parts.get(part, 0)
        flops = [parts.get(part, 0) for parts in account.flops.values()]
        if size or any(flops):
            cells = [human(number) if number else "" for number in (size, *flops)]
            percent = f"{size / account.parameters:.1%}" if size else ""
            table.add_row(part, cells[0], percent, *cells[1:])
    table.add_section()
    forward, training = account.forward_flops.values(), account.training_flops.values()
    table.add_row("all, forward", human(account.parameters), "100.0%", *map(human, forward))
    table.add_row("forward and backward", "", "", *map(human, training))
    return table


def _memory_table(account: Account) -> Table:
    sequences = f"{account.batch} × {account.length}"
    table = Table(title="memory")
    table.add_column("")
    for name in (*(f"inference, {form}" for form in account.inference), "training, float32"):
        table.add_column(name, justify="right")
    training, both = account.training, list(account.inference.values())

    def row(name: str, inference: list[int], trained: int = 0) -> None:
        if any(inference) or trained:
            table.add_row(name, *(human_bytes(x) if x else "" for x in (*inference, trained)))

    row("weights", [each.weights for each in both], training.weights)
    row("gradients", [0] * len(both), training.gradients)
    row("Adam's moments", [0] * len(both), training.moments)
    for token, kept in training.activations_per_token.items():
        row(f"cache / {_noun(token)}", [each.cache_per_token[token] for each in both])
        row(f"activations / {_noun(token)}", [0] * len(both), kept)
    row("states / sequence", [each.state for each in both])
    row(f"cache, {sequences} tokens", [each.cache for each in both])
    row(f"activations, {sequences} tokens", [0] * len(both), training.activations)
    table.add_section()
    row("together", [each.weights + each.cache for each in both], training.total)
    return table
