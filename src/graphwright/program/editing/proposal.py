"""Changes that a controller proposes between the steps of a training, and the one edit that makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphwright.program.editing.journal import Entry
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


@dataclass(frozen=True, slots=True)
class Proposal:
    """One change that a controller proposes, or an event that it reports.

    Attributes:
        event: kind of the event in the log of a life, such as `expert_reborn` or `alarm`.
        name: what it concerns, such as `layers.1.mlp.experts.7`; `blame(name)` lists it.
        reason: text for the journal.
        facts: JSON values for journal and log.
        apply: makes the change in an open edit; None for an event without one.
        steps_ago: how many steps before the present one an event happened.
    """

    event: str
    name: str
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    apply: Callable[[Transaction], object] | None = None
    steps_ago: int = 0


def apply_proposals(program: Program, proposals: Iterable[Proposal], tool: str, step: int) -> Entry | None:
    """Make the proposed changes in one edit of author `lifecycle`, with an annotation each; return its entry.

    Without a change there is no edit, and the result is None. `tool` is the name of the controller.
    """
    made = [(x, x.apply) for x in proposals if x.apply is not None]
    if not made:
        return None
    kinds = ", ".join(f"{x.event} {x.name}" for x, _ in made[:3]) + (", ..." if len(made) > 3 else "")
    with program.edit(kinds, author="lifecycle", tool=tool) as e:
        for x, apply in made:
            apply(e)
            e.annotate(x.name, event=x.event, step=step, reason=x.reason, **x.facts)
    return program.journal[-1]
