"""What recovery found in a program, and what it left as plain ops."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Recovered:
    """The result of `recover`.

    Attributes:
        found: kind of op -> paths of the nodes that stand for a recovered region.
        left: kind of op -> for each region that stayed as it was its path, and why.
        dropped: keys of constants that nothing reads any more, such as mask buffers; the program no longer has them.
    """

    found: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, dict[str, str]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def count(self, kind: str, prefix: str = "") -> int:
        """Return how many regions of a kind were recovered in the module with a path."""
        return sum(path.startswith(f"{prefix}." if prefix else "") for path in self.found.get(kind, ()))

    def __str__(self) -> str:
        lines = [f"recovered {kind}: {len(paths)}" for kind, paths in self.found.items()]
        lines += [f"left {kind}: {path}: {why}" for kind, paths in self.left.items() for path, why in paths.items()]
        return "\n".join(lines) or "nothing to recover"
