"""The text of an answer, as its tokens come: token ids enter one by one, the text that is safe to show leaves.

Called by `pdjax.handle`: in the reader's thread for all text that a user sees, and in the controller's thread to find
out when a stop text is complete. What comes out depends on the tokens alone, never on how they were grouped, so that a
result, a stream and an asynchronous stream agree to the character.
"""

from collections.abc import Iterable, Sequence

from pdjax.models.tokenizer import Detokenizer, Tokenizer


class AnswerText:
    """Decodes tokens and cuts the text at the first stop text; see `Detokenizer` and `StopTexts`.

    Attributes:
        stopped: a stop text is complete; later tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopTexts(stop) if stop else None

    def push(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` make certain: no half character, nothing that could still become a stop text."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._cut(self._detokenizer.push(tokens))

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self._detokenizer is None or self.stopped:
            return ""
        text = self._cut(self._detokenizer.finish())
        return text if self.stopped or self._stops is None else text + self._stops.held

    def _cut(self, text: str) -> str:
        if self._stops is None:
            return text
        shown, self.stopped = self._stops.push(text)
        return shown


def text_of(tokenizer: Tokenizer | None, stop: Sequence[str], tokens: Iterable[int]) -> str:
    """The whole text of an answer: what the pieces of a stream add up to. "" without a tokenizer."""
    text = AnswerText(tokenizer, stop)
    return text.push(tokens) + text.finish()


class StopTexts:
    """Finds the stop text that is complete first in a text that comes in pieces; if several are complete with the same
    character, the longest. None of them is empty.

    Follows each stop text as Knuth, Morris and Pratt do ("Fast pattern matching in strings", SIAM J. Comput. 6, 1977):
    how much of it the text now ends with. That is a bounded amount of work per character, whatever the texts are, and
    the most that any of them has matched is just what must be held back.

    Attributes:
        held: the end of the text so far that could become a stop text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.held = ""
        self._stops = tuple(stops)
        self._falls = [_falls(stop) for stop in stops]
        self._matched = [0] * len(self._stops)

    def push(self, piece: str) -> tuple[str, bool]:
        """Takes the next piece. The text that no stop text can contain any more, and whether one is complete; that
        one, and what comes after it, is in no text that is returned."""
        text = self.held + piece
        for end, char in enumerate(piece, start=len(self.held) + 1):
            complete = 0
            for i, (stop, falls) in enumerate(zip(self._stops, self._falls, strict=True)):
                matched = self._matched[i]
                while matched and stop[matched] != char:
                    matched = falls[matched]
                matched += stop[matched] == char
                self._matched[i] = matched
                if matched == len(stop):
                    complete = max(complete, matched)
            if complete:
                self.held = ""
                return text[: end - complete], True
        keep = len(text) - max(self._matched)
        self.held = text[keep:]
        return text[:keep], False


def _falls(stop: str) -> list[int]:
    """Entry n: the longest proper beginning of `stop` that its first n characters also end with."""
    falls = [0, 0]
    for end in range(1, len(stop)):
        matched = falls[end]
        while matched and stop[matched] != stop[end]:
            matched = falls[matched]
        falls.append(matched + (stop[matched] == stop[end]))
    return falls
