"""The text of a streamed answer, as the client has it."""


class StreamedText:
    """Pieces that were sent before the whole answer was known, and how they fit to it.

    The server takes the answer apart when it is whole, and may then trim the text before a tool call; what was sent
    cannot be taken back, so it stands.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        self._pieces.append(piece)

    def rest(self, text: str) -> str:
        """What is still to be sent of the whole text; nothing where the pieces do not begin it."""
        whole = "".join(self._pieces)
        rest = text[len(whole) :] if text.startswith(whole) else ""
        if rest:
            self._pieces.append(rest)
        return rest

    @property
    def whole(self) -> str:
        return "".join(self._pieces)
