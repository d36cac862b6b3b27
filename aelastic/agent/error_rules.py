"""Which rules of `--restart-policy` a failure matches by their `error` patterns: found out on its own node.

The leader gets the places of the rules, and searches for nothing: it is a core, and has other nodes to serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from aelastic.failures.failure import ProcessFailure
from aelastic.host.patterns import PatternSearch
from aelastic.rdzv.restart_rules import Rule, error_patterns

# Of a headline, which may be a whole data set.
CHARS_MAX = 4096


class ErrorRules:
    """The rules of one run.

    Args:
        rules: all of them, in their order.
        env: of the process that searches.
    """

    def __init__(self, rules: Sequence[Rule], env: Mapping[str, str] | None = None) -> None:
        self._places = error_patterns(rules)
        self._search = PatternSearch(env)

    def prepare(self) -> None:
        """Starts what searches, so that the first failure does not wait for that."""
        if self._places:
            with suppress(OSError):  # the first search tries again, and logs what fails
                self._search.start()

    async def matched_by(self, failure: ProcessFailure) -> ProcessFailure:
        """The failure with the rules that it matches, as far as that is known within a second."""
        if not self._places:
            return failure
        headline = failure.for_others().headline[:CHARS_MAX]  # as all nodes see it
        found = await self._search.found(list(self._places), headline)
        places = {place for pattern in found for place in self._places[pattern]}
        return failure.replace(matched_rules=tuple(sorted(places)))

    async def aclose(self) -> None:
        """Ends what searches."""
        await self._search.aclose()
