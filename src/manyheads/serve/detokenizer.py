"""A text that grows token by token: whole characters only, and nothing of what ends it."""

from collections.abc import Sequence

from manyheads.tokenizer.tokenizer import Tokenizer

BROKEN = "\ufffd"  # what stands for bytes that are no character yet


class Growing:
    """What follows a prompt. `add` and `end` give the text that is sure by then.

    A character of several tokens waits for the last of them, and what may be the beginning of a
    stop text waits until more is known.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ids = list(prompt)
        self.begun = self.read = tokenizer.decode(self.ids)
        self.held = ""
        self.stopped = False

    @property
    def length(self) -> int:
        """Characters so far, those that wait included."""
        return len(self.read) - len(self.begun)

    def add(self, token: int) -> str:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith(BROKEN):
            return ""
        # By length: bytes that follow may spoil what was a sign.
        new, self.read = text[len(self.read) :], text
        return self._passed(new)

    def end(self) -> str:
        """What was held back, once nothing follows any more."""
        if self.stopped:
            return ""
        last = self._passed(self.tokenizer.decode(self.ids)[len(self.read) :])
        found = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        self.stopped = self.stopped or bool(found)
        held, self.held = self.held[: min(found, default=len(self.held))], ""
        return last + held

    def _passed(self, new: str) -> str:
        self.held += new
        begins = (at for at in range(len(self.held)) if self._may_stop(at))
        at = next(begins, len(self.held))
        sure, self.held = self.held[:at], self.held[at:]
        if self.stops and self.held.startswith(self.stops):
            self.stopped, self.held = True, ""
        return sure

    def _may_stop(self, at: int) -> bool:
        return any(stop.startswith(self.held[at : at + len(stop)]) for stop in self.stops)
