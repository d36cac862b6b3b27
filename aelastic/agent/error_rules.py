"""Which rules of `--restart-policy` a failure matches by their `error` patterns: searched on the node that failed.

The leader receives the positions of the rules and never searches: it is a core, and has other nodes to serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from aelastic.base.host.patterns import PatternSearch
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.rdzv.restart_rules import Rule, error_patterns

# How much of a headline is searched: it may contain a whole data set.
CHARS_MAX = 4096


class ErrorRules:
    """The rules of one run.

    Args:
        rules: all of them, in their order.
        env: the environment of the process that searches.
    """

    def __init__(self, rules: Sequence[Rule], env: Mapping[str, str] | None = None) -> None:
        self._places = error_patterns(rules)
        self._search = PatternSearch(env)

    def prepare(self) -> None:
        """Starts the search process, so that the first failure does not wait for it."""
        if self._places:
            with suppress(OSError):  # the first search tries again, and logs the error
                self._search.start()

    async def matched_by(self, failure: ProcessFailure) -> ProcessFailure:
        """Returns the failure with the rules that it matches, as far as these are found within a second."""
        if not self._places:
            return failure
        headline = failure.for_others().headline[:CHARS_MAX]  # as all nodes see it
        found = await self._search.found(list(self._places), headline)
        places = {place for pattern in found for place in self._places[pattern]}
        return failure.replace(matched_rules=tuple(sorted(places)))

    async def aclose(self) -> None:
        """Ends the search process."""
        await self._search.aclose()
